"""Copies of ranks' files on other hosts: which rank's copy goes where, and the messages that carry it.

hosts      a  a  b  b  c  c
rank       0  1  2  3  4  5
its copy   2  3  4  5  0  1           and back, to a rank that has lost its file

A thread of its own sends and receives, over a process group that is used for nothing else: no training step
waits for it.

    sender       sizes | manifest | piece 0 | piece 1 | …         all are queued at once, from where they are
    receiver     sizes | manifest | piece 0 | …                   one at a time, to where they will be

Bytes are bytes: nothing that arrives is run, and what is read from it later is compared with its hash.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.errors import UserError
from echelon.state.checkpoint.manifest import MOST_BYTES

Found = Mapping[str, Sequence[int]]  # by generation, the ranks whose files are there


class Sending(NamedTuple):
    """A file of rank `receiver`, which the rank `sender` has on its host."""

    sender: int
    receiver: int


def receivers(hosts: Sequence[str]) -> list[int | None]:
    """Return by rank the rank that keeps its copy; None where all ranks are on one host."""
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return [None] * len(hosts)
    members = {name: [rank for rank, host in enumerate(hosts) if host == name] for name in names}
    chosen: list[int | None] = []
    for rank, host in enumerate(hosts):
        following = members[names[(names.index(host) + 1) % len(names)]]
        chosen.append(following[members[host].index(rank) % len(following)])
    return chosen


def whole_generations(found: Sequence[Found]) -> list[str]:
    """List the generations with a file of every rank on some host, newest first; `found`: by rank."""
    names = sorted({name for of_rank in found for name in of_rank}, reverse=True)
    ranks = set(range(len(found)))
    return [name for name in names if ranks <= {rank for each in found for rank in each.get(name, ())}]


def sendings(generation: str, found: Sequence[Found]) -> list[Sending]:
    """Return how each rank without its file gets it."""
    holders = [set(of_rank.get(generation, ())) for of_rank in found]
    return [
        Sending(next(other for other, held in enumerate(holders) if rank in held), rank)
        for rank, here in enumerate(holders)
        if rank not in here
    ]


PIECE_BYTES = 1 << 26
_MOST_FILE_BYTES = 1 << 50


class RankCopy(NamedTuple):
    """The bytes of a manifest, and of the file that it describes."""

    manifest: Tensor
    file: Tensor


def num_files(host: str, hosts: Sequence[str], keepers: Sequence[int | None]) -> int:
    """Return how many ranks have their state on a host: its own, and those whose copies it keeps."""
    copies = [keeper for keeper in keepers if keeper is not None and hosts[keeper] == host]
    return list(hosts).count(host) + len(copies)


def send(copy: RankCopy | None, to: int, group: dist.ProcessGroup) -> list[dist.Work]:
    """Begin to send a copy, or the word that there is none. Its memory must stay until each work is done."""
    if copy is None:
        parts = [torch.zeros(2, dtype=torch.int64)]
    else:
        sizes = torch.tensor([copy.manifest.numel(), copy.file.numel()])
        parts = [sizes, copy.manifest, *copy.file.split(PIECE_BYTES)]
    return [work for part in parts if (work := dist.isend(part, to, group)) is not None]


def receive(make_room: Callable[[int], Tensor], source: int, group: dist.ProcessGroup) -> RankCopy:
    """Receive a file into the memory of `make_room(size)`; if that raises, drop it: no sender waits."""
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
        # The sender has queued all of it: a receiver that does not take it would block the next save.
        dropped = torch.empty(min(file_bytes, PIECE_BYTES), dtype=torch.uint8)
        for begin in range(0, file_bytes, PIECE_BYTES):
            dist.recv(dropped[: file_bytes - begin], source, group)
        raise
    for piece in file.split(PIECE_BYTES):
        dist.recv(piece, source, group)
    return RankCopy(manifest, file)
