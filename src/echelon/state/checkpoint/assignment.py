"""The assignment of slices to ranks and their files, and the manifest that says so.

Each slice is written once, and every rank writes about as many bytes as the others: slices that several ranks
hold (replicas) are shared out. All ranks compute the same from the same lists, so reports are short: sizes,
hashes and numbers. The assignment is kept from one save to the next.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from echelon.collectives import Group
from echelon.state.assembly import Key, RankSlice, cover, exchange_slices
from echelon.state.checkpoint.manifest import FileRecord, Manifest, Number, PieceRecord, TensorRecord
from echelon.state.checkpoint.part_writer import FileLayout, lay_out
from echelon.state.ownership import ENGINE, OwnedSlice, Slice
from echelon.state.weight_files.tensor_file import TensorEntry, check_types


def share_out(lists: Sequence[Sequence[RankSlice]]) -> list[list[Slice]]:
    """Return by rank the slices that it writes, of those that each rank owns."""
    owners: dict[Key, dict[Slice, list[RankSlice]]] = {}
    for owned in lists:
        for box in owned:
            owners.setdefault((box.slice.name, box.slice.part), {}).setdefault(box.slice, []).append(box)
    chosen = [holders[box] for holders in owners.values() for box in cover(holders)]
    # Largest first, and slices of one size by name: the same order on every rank.
    chosen.sort(key=lambda holders: (-_num_bytes(holders[0]), holders[0].slice))
    written: list[list[Slice]] = [[] for _ in lists]
    taken = [0] * len(lists)
    for holders in chosen:
        writer = min((box.owner for box in holders), key=lambda rank: (taken[rank], rank))
        taken[writer] += _num_bytes(holders[0])
        written[writer].append(holders[0].slice)
    return written


def _num_bytes(box: RankSlice) -> int:
    dtype: torch.dtype = getattr(torch, box.dtype)
    return box.slice.numel * dtype.itemsize


class Assignment(NamedTuple):
    """The files that each rank writes, and the numbers it reports. `signature`: of what this rank owns."""

    signature: str
    layouts: list[list[FileLayout]]
    numbers: list[list[Slice]]


def signature(owned: Sequence[OwnedSlice]) -> str:
    """Return a text that is the same for the same boxes of the same types."""
    found = hashlib.sha256()
    for each in owned:
        found.update(repr((tuple(each.slice), each.tensor.dtype)).encode())
    return found.hexdigest()


def assign(owned: Sequence[OwnedSlice], group: Group, device: torch.device) -> Assignment:
    """Exchange what all ranks own, and share it out; all of them must call this."""
    lists = exchange_slices(owned, group, device)
    dtypes: dict[Slice, torch.dtype] = {
        box.slice: getattr(torch, box.dtype) for of_rank in lists for box in of_rank
    }
    written = share_out(lists)
    tensors = [[(box, dtypes[box]) for box in of_rank if not is_number(box)] for of_rank in written]
    check_types(
        "what is saved",
        [TensorEntry(f"{b.name} ({b.part})", b.sizes, dtype) for of_rank in tensors for b, dtype in of_rank],
    )
    return Assignment(
        signature(owned),
        [lay_out(rank, of_rank) for rank, of_rank in enumerate(tensors)],
        [[box for box in of_rank if is_number(box)] for of_rank in written],
    )


def is_number(box: Slice) -> bool:
    """Return whether it is a counter of the engine's own: these stand in the manifest."""
    return box.name == ENGINE and not box.shape


def describe_tensors(
    owned: Iterable[tuple[Slice, str]], layouts: Iterable[FileLayout], stored_name: Callable[[str], str] = str
) -> dict[str, dict[str, TensorRecord]]:
    """Describe the tensors of slices and their types, with the pieces that files have of them."""
    pieces: dict[Key, list[PieceRecord]] = {}
    for layout in layouts:
        for box, _, tensor, _ in layout.boxes:
            piece = PieceRecord(stored_name(layout.name), tensor, box.offsets, box.sizes)
            pieces.setdefault((box.name, box.part), []).append(piece)
    tensors: dict[str, dict[str, TensorRecord]] = {}
    for box, dtype in owned:
        parts = tensors.setdefault(box.name, {})
        if box.part not in parts:
            parts[box.part] = TensorRecord(box.shape, dtype, tuple(pieces.get((box.name, box.part), ())))
    return tensors


def join_reports(
    about: Manifest, assignment: Assignment, reports: Sequence[Any], stored_name: Callable[[str], str]
) -> Manifest:
    layouts = [layout for of_rank in assignment.layouts for layout in of_rank]
    written = [
        (box.slice, str(box.dtype).removeprefix("torch.")) for layout in layouts for box in layout.boxes
    ]
    numbers: dict[str, Number] = {}
    files: dict[str, FileRecord] = {}
    for report in reports:
        numbers |= report["numbers"]
        files |= {name: FileRecord(*record) for name, record in report["files"].items()}
    tensors = describe_tensors(written, layouts, stored_name)
    return replace(about, tensors=tensors, numbers=numbers, files=files)
