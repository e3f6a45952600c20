"""The gradients of a plan against those of one device, tensor by tensor.

Rank 0 sends each reference to all ranks, and every rank compares the boxes of it that its own optimizer
would use: a sum that only one of several ranks has missed is found too.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.ownership import OwnedSlice

# How far gradients may differ, relative to the norm of each tensor's. What is beyond is compared with what
# rounding, and other random numbers, do to the reference.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
TIMES_ROUNDING, TIMES_DRAWS = 30.0, 4.0
_BUNDLE = 2**23  # elements that travel together


class Difference(NamedTuple):
    """Of one parameter: the norm of the difference, and of the reference."""

    name: str
    distance: float
    norm: float

    @property
    def relative(self) -> float:
        if self.distance == 0:
            return 0.0
        return self.distance / self.norm if self.norm else float("inf")


def compare_gradients(
    owned: Sequence[OwnedSlice],
    reference: Mapping[str, Tensor],
    likes: Mapping[str, Tensor],
    factor: float,
    group: Group | None,
    device: torch.device,
) -> list[Difference]:
    """On all ranks alike. `owned`: gradients here, to be multiplied by `factor`; `reference`: on rank 0;
    `likes`: tensors of the meta device, for all that may have a gradient."""
    boxes: dict[str, list[OwnedSlice]] = {}
    for each in owned:
        boxes.setdefault(each.slice.name, []).append(each)
    rows: dict[str, Tensor] = {}
    for names in _bundles(likes):
        for name, whole in _share(names, reference, likes, group, device):
            rows[name] = _compare(boxes.get(name, []), whole, factor)
    if not rows:
        return []
    numbers = torch.stack(list(rows.values()))
    if group is not None:
        with group.ledger.about("checks"):
            group.all_reduce(numbers, "max")
    table: list[list[float]] = numbers.tolist()
    return [
        # Where no rank has a gradient, all of the reference is missing.
        Difference(name, distance**0.5 if is_held else norm**0.5, norm**0.5)
        for name, (distance, norm, is_held) in zip(rows, table, strict=True)
    ]


def _bundles(likes: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names of one type whose tensors travel together."""
    for dtype in dict.fromkeys(like.dtype for like in likes.values()):
        names: list[str] = []
        for name in sorted(name for name, like in likes.items() if like.dtype == dtype):
            if names and sum(likes[each].numel() for each in (*names, name)) > _BUNDLE:
                yield names
                names = []
            names.append(name)
        yield names


def _share(
    names: Sequence[str],
    reference: Mapping[str, Tensor],
    likes: Mapping[str, Tensor],
    group: Group | None,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """The references of rank 0, on every rank; zero where there is none."""
    dtype = likes[names[0]].dtype
    tensors = [
        reference[name].to(dtype).flatten()
        if name in reference
        else torch.zeros(likes[name].numel(), dtype=dtype)
        for name in names
    ]
    bundle = torch.cat([tensor.to(device) for tensor in tensors])
    if group is not None and len(bundle):
        with group.ledger.about("checks"):
            group.broadcast(torch.view_as_real(bundle) if bundle.is_complex() else bundle)
    for name, part in zip(names, bundle.split([likes[name].numel() for name in names]), strict=True):
        yield name, part.view(likes[name].shape)


def _compare(boxes: Sequence[OwnedSlice], whole: Tensor, factor: float) -> Tensor:
    """(squared distance, squared norm, whether there is a gradient here); not a number is infinitely far from
    one, and at no distance from another."""
    distance = torch.zeros((), dtype=torch.float64, device=whole.device)
    for each in boxes:
        part, own = whole[each.slice.box], each.tensor.to(whole.dtype) * factor
        gap = torch.where((part == own) | (part.isnan() & own.isnan()), 0, part - own).abs()
        distance = distance + gap.nan_to_num(torch.inf, torch.inf).square().sum(dtype=torch.float64)
    norm = whole.abs().nan_to_num(0.0, 0.0).square().sum(dtype=torch.float64)
    return torch.stack([distance, norm, torch.full_like(norm, float(bool(boxes)))])
