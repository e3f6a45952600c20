"""A checkpoint that one process writes by itself; each tensor is read when its bytes are due."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from echelon.state.checkpoint.assignment import Assignment, join_reports
from echelon.state.checkpoint.atomic import new_token
from echelon.state.checkpoint.file_image import FileImage, FileLayout
from echelon.state.checkpoint.manifest import FileRecord, Manifest, Number
from echelon.state.checkpoint.part_writer import FilledChunks, Sink
from echelon.state.checkpoint.rank_save import SaveOptions, commit, write_files
from echelon.state.checkpoint.storage_errors import report_write_errors
from echelon.state.checkpoint.target import target_at
from echelon.state.ownership import Slice

_CPU = torch.device("cpu")
Read = Callable[[Slice], Tensor]


def save_alone(
    path: str | Path,
    about: Manifest,
    numbers: Mapping[str, Number],
    files: Sequence[tuple[FileLayout, Read]],
    options: SaveOptions,
) -> None:
    """Write each file from what `read` returns. `about` has everything but tensors, numbers and files."""
    target = target_at(path, new_token())
    records: dict[str, tuple[object, ...]] = {}
    try:
        with report_write_errors(path):
            target.begin()
            for layout, read in files:

                def write(layout: FileLayout, sink: Sink, read: Read = read) -> FileRecord:
                    return FilledChunks(layout.size, _CPU).write(sink, FileImage(layout, read))

                records |= write_files(target, [layout], write, options.retries)
        assignment = Assignment("", [[layout for layout, _ in files]], [])
        report = {"numbers": dict(numbers), "files": records}
        commit(path, target, join_reports(about, assignment, [report], target.stored_name), options)
    except BaseException:
        target.abandon()
        raise
