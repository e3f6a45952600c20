"""A folder of torch.distributed.checkpoint, written by one process from tensors that come one by one.

    write_dcp("runs/a/export/dcp", entries, fetch)

    state = model.state_dict()
    torch.distributed.checkpoint.load(state, checkpoint_id="runs/a/export/dcp")

torch writes its metadata and tensors with pickle; only foreign/dcp.py reads such a folder, if it is told to.
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from echelon.state.weight_files.tensor_file import TensorEntry, report_os_errors


def write_dcp(folder: str | Path, entries: Sequence[TensorEntry], fetch: Callable[[str], Tensor]) -> None:
    """Write the tensors of entries; `fetch(name)` is called for each in order, and few are in memory."""
    state = {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in entries}
    # A file for each tensor, one after the other: torch keeps those of one file in memory together.
    writer = FileSystemWriter(folder, single_file_per_rank=False, thread_count=1, per_thread_copy_ahead=0)
    with report_os_errors(Path(folder)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        try:
            save(state, storage_writer=writer, planner=_FetchingPlanner(fetch), no_dist=True)
        except CheckpointException as error:  # which hides that of the disk, or of `fetch`
            ((cause, _),) = error.failures.values()
            raise cause from error


@final
class _FetchingPlanner(DefaultSavePlanner):
    """Plans with tensors of the meta device, and fetches each when it is written."""

    def __init__(self, fetch: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._fetch = fetch

    def lookup_object(self, index: Any) -> Tensor:
        return self._fetch(index.fqn)
