"""Which slices a rank writes: each one once, and every rank about as many bytes as the others.

Slices that several ranks hold (replicas) are shared out. All ranks compute the same from the same lists.
"""

import math
from collections.abc import Sequence

import torch

from echelon.state.assembly import RankSlice
from echelon.state.ownership import Slice

Key = tuple[str, str]


def share_out(lists: Sequence[Sequence[RankSlice]]) -> list[list[Slice]]:
    """By rank, what it writes, of what each rank owns."""
    owners: dict[Key, dict[Slice, list[RankSlice]]] = {}
    for owned in lists:
        for box in owned:
            owners.setdefault((box.slice.name, box.slice.part), {}).setdefault(box.slice, []).append(box)
    chosen = [holders for key in owners for holders in _cover(owners[key])]
    chosen.sort(key=lambda holders: (-_num_bytes(holders[0]), holders[0].slice))
    written: list[list[Slice]] = [[] for _ in lists]
    taken = [0] * len(lists)
    for holders in chosen:
        writer = min((box.owner for box in holders), key=lambda rank: (taken[rank], rank))
        taken[writer] += _num_bytes(holders[0])
        written[writer].append(holders[0].slice)
    return written


def _cover(boxes: dict[Slice, list[RankSlice]]) -> list[list[RankSlice]]:
    """Boxes that hold each element once: one that is whole, or all, which then do not overlap."""
    whole = [holders for box, holders in boxes.items() if box.is_whole]
    if whole:
        return whole[:1]
    first, num_held = next(iter(boxes)), sum(box.numel for box in boxes)
    assert num_held == math.prod(first.shape), (
        f"{first.name} ({first.part}) of shape {first.shape}: all ranks hold {num_held} elements"
    )
    return list(boxes.values())


def _num_bytes(box: RankSlice) -> int:
    dtype: torch.dtype = getattr(torch, box.dtype)
    return box.slice.numel * dtype.itemsize
