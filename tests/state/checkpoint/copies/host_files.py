"""Copies in memory of two ranks, without ranks: each has half of the rows of `w`, and all of `b`."""

import os

import torch
from torch import Tensor

from echelon.state.assembly import RankSlice
from echelon.state.checkpoint.copies import rank_file
from echelon.state.checkpoint.copies.folder import Entry, MappedFile, MemoryFolder, generation_of, write_small
from echelon.state.checkpoint.manifest import Manifest
from echelon.state.ownership import ENGINE, OwnedSlice, Slice

PLAN = "data=2"


def tensors(step: int) -> dict[str, Tensor]:
    return {"w": torch.arange(12.0).view(4, 3) + step, "b": torch.full((5,), step, dtype=torch.bfloat16)}


def write_copies(folder: MemoryFolder, step: int, ranks: tuple[int, ...] = (0, 1)) -> None:
    """Write the files of these ranks; their slot is that of no earlier save."""
    folder.make(os.getpid())
    owned = [_owned(step, rank) for rank in (0, 1)]
    lists = [
        [RankSlice(each.slice, str(each.tensor.dtype).removeprefix("torch."), rank) for each in of_rank]
        for rank, of_rank in enumerate(owned)
    ]
    about = Manifest(step, PLAN, 2, "2030", {"echelon": "1", "torch": "2"}, extra={"step": step})
    for rank in ranks:
        layout = rank_file.layout_of(rank, owned[rank])
        slot = folder.free_slot(rank, None)
        memory = MappedFile(folder.file(slot, rank), layout.size).memory
        rank_file.fill(memory, layout, owned[rank])
        numbers = rank_file.own_numbers(owned[rank])
        manifest = rank_file.with_hash(rank_file.describe_file(about, lists, layout, numbers), layout, memory)
        entry = Entry(rank, generation_of(step, "0123456789abcdef"), slot)
        write_small(folder.manifest(entry), manifest.as_bytes())


def make_other_version(folder: MemoryFolder) -> None:
    """All copies are as another echelon would write them."""
    for entry in folder.entries():
        path = folder.manifest(entry)
        path.write_bytes(path.read_bytes().replace(b'"version": 2', b'"version": 1', 1))


def _owned(step: int, rank: int) -> list[OwnedSlice]:
    whole = tensors(step)
    rows, b = whole["w"][2 * rank : 2 * rank + 2], whole["b"]
    return [
        OwnedSlice(Slice("w", "value", (4, 3), (2 * rank, 0), (2, 3)), rows),
        OwnedSlice(Slice("b", "value", (5,), (0,), (5,)), b),
        OwnedSlice(Slice(ENGINE, "begun steps", (), (), ()), torch.tensor(step)),
    ]
