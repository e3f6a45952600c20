"""Whole tensors, put together from what ranks own, one at a time.

The ranks exchange lists of what they own. What every rank holds whole is copied. Of the rest, the first owner
of each box puts it into a tensor of zeros, and these are summed: on every rank, or on one. Two boxes of a
tensor are the same, or do not overlap.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.collectives.agreement import gather_values
from echelon.state.ownership import OwnedSlice, Slice

Key = tuple[str, str]  # the name of a tensor, and the part: its value, or a key of its optimizer state


class RankSlice(NamedTuple):
    """A box of a tensor, and a rank that holds it."""

    slice: Slice
    dtype: str
    owner: int


@final
class Assembly:
    """The tensors that the ranks of a group own; all ranks ask for the same ones in the same order."""

    def __init__(self, owned: Sequence[OwnedSlice], group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self._local = {each.slice: each.tensor for each in owned}
        first_owners: dict[Key, dict[Slice, RankSlice]] = {}
        held_whole: list[set[Slice]] = []
        for boxes in exchange_slices(owned, group, device):
            held_whole.append({box.slice for box in boxes if box.slice.is_whole})
            for box in boxes:
                first_owners.setdefault((box.slice.name, box.slice.part), {}).setdefault(box.slice, box)
        self._everywhere = set.intersection(*held_whole)
        self._boxes = {key: [boxes[box] for box in cover(boxes)] for key, boxes in first_owners.items()}

    def __iter__(self) -> Iterator[Key]:
        return iter(self._boxes)

    def like(self, key: Key) -> Tensor:
        first = self._boxes[key][0]
        return torch.empty(first.slice.shape, dtype=getattr(torch, first.dtype), device="meta")

    def tensor(self, key: Key, to: int | None = None) -> Tensor | None:
        """Return a copy of a whole tensor on every rank; or on rank `to` alone, and None on the others."""
        boxes = self._boxes[key]
        is_wanted = to is None or to == self._group.rank
        if boxes[0].slice in self._everywhere:
            local = self._local[boxes[0].slice].detach()
            if not is_wanted:
                return None
            return local.to(self._device, copy=True, memory_format=torch.contiguous_format)
        tensor = self._own_boxes(boxes)
        if tensor.numel():  # the shape is the same on all ranks, so all skip the sum of an empty one
            self._sum(tensor, to)
        return tensor if is_wanted else None

    def _own_boxes(self, boxes: Sequence[RankSlice]) -> Tensor:
        first = boxes[0]
        tensor = torch.zeros(first.slice.shape, dtype=getattr(torch, first.dtype), device=self._device)
        for box in boxes:
            if box.owner == self._group.rank:
                tensor[box.slice.box] = self._local[box.slice].detach()
        return tensor

    def _sum(self, tensor: Tensor, to: int | None) -> None:
        data = tensor.view(-1).view(torch.uint8)  # zeros add to bytes of any type without a trace
        with self._group.ledger.about("assembly"):
            if to is None:
                self._group.all_reduce(data)
            else:
                self._group.reduce(data, to)


def assemble(owned: Sequence[OwnedSlice], group: Group, device: torch.device) -> dict[Key, Tensor]:
    """Return copies of all tensors, whole, on every rank of the group."""
    assembly = Assembly(owned, group, device)
    tensors = {key: assembly.tensor(key) for key in sorted(assembly)}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}


def cover(boxes: Collection[Slice]) -> list[Slice]:
    """Choose boxes of a tensor that hold each element once: a whole one alone, or all, which do not overlap.

    Bytes of boxes that overlap would be added up, and what is missing would be zeros.
    """
    whole = [box for box in boxes if box.is_whole]
    first, num_held = next(iter(boxes)), sum(box.numel for box in boxes)
    assert whole or num_held == math.prod(first.shape), (
        f"{first.name} ({first.part}) of shape {first.shape}: the boxes of all ranks hold {num_held} elements"
    )
    return whole[:1] or list(boxes)


def exchange_slices(owned: Sequence[OwnedSlice], group: Group, device: torch.device) -> list[list[RankSlice]]:
    """Return what every rank of the group owns, in rank order; all of them must call this."""
    rows = [(*each.slice, str(each.tensor.dtype).removeprefix("torch.")) for each in owned]
    return [
        [
            RankSlice(Slice(name, part, tuple(shape), tuple(offsets), tuple(sizes)), dtype, rank)
            for name, part, shape, offsets, sizes, dtype in of_rank
        ]
        for rank, of_rank in enumerate(gather_values(rows, group, device, "assembly"))
    ]
