"""Files between hosts, in a thread of its own: nobody in a training step waits for them.

    sender       sizes | manifest | piece 0 | piece 1 | …         all are queued at once, from where they are
    receiver     sizes | manifest | piece 0 | …                   one at a time, to where they will be

The group is used for nothing else. Bytes are bytes: nothing that arrives is run, and what is read from it
later is compared with its hash.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.errors import UserError
from echelon.state.checkpoint.manifest_text import MOST_BYTES

PIECE_BYTES = 1 << 26
_MOST_FILE_BYTES = 1 << 50


class RankCopy(NamedTuple):
    """The bytes of a manifest, and of the file that it describes."""

    manifest: Tensor
    file: Tensor


def send(copy: RankCopy, to: int, group: dist.ProcessGroup) -> list[dist.Work]:
    """Begin to send; the memory must stay as it is until each work has been waited for."""
    sizes = torch.tensor([copy.manifest.numel(), copy.file.numel()])
    return [
        work
        for part in (sizes, copy.manifest, *copy.file.split(PIECE_BYTES))
        if (work := dist.isend(part, to, group)) is not None
    ]


def send_none(to: int, group: dist.ProcessGroup) -> list[dist.Work]:
    """Say that there is no copy: the other one waits for it."""
    work = dist.isend(torch.zeros(2, dtype=torch.int64), to, group)
    return [] if work is None else [work]


def receive(make_room: Callable[[int], Tensor], source: int, group: dist.ProcessGroup) -> RankCopy:
    """Receive a file into the memory that `make_room(size)` gives. If that raises, the file is received and
    dropped, so that its sender does not wait."""
    sizes = torch.empty(2, dtype=torch.int64)
    dist.recv(sizes, source, group)
    manifest_bytes, file_bytes = sizes.tolist()
    if manifest_bytes == file_bytes == 0:
        raise UserError(f"rank {source} could not make its copy in memory, and sends none")
    if not 0 < manifest_bytes <= MOST_BYTES or not 0 < file_bytes <= _MOST_FILE_BYTES:
        raise UserError(f"rank {source} sends a copy of {file_bytes} bytes, which no rank has")
    manifest = torch.empty(manifest_bytes, dtype=torch.uint8)
    dist.recv(manifest, source, group)
    try:
        file = make_room(file_bytes)
    except UserError:
        dropped = torch.empty(min(file_bytes, PIECE_BYTES), dtype=torch.uint8)
        for begin in range(0, file_bytes, PIECE_BYTES):
            dist.recv(dropped[: file_bytes - begin], source, group)
        raise
    for piece in file.split(PIECE_BYTES):
        dist.recv(piece, source, group)
    return RankCopy(manifest, file)
