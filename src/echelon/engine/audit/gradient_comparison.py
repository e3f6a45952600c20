"""The gradients of a plan against those of one device, tensor by tensor.

Rank 0 sends each reference to all ranks, and every rank compares the boxes of it that its own optimizer
would use: a sum that only one of several ranks has missed is found too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.state.ownership import OwnedSlice, Slice, own_run, run_slices

# How far gradients may differ, relative to the norm of each tensor's. What is beyond is compared with what
# rounding, and other random numbers, do to the reference.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
# A plan's sums in 16 bits may be as far from exact ones as those of one device, on the other side.
TIMES_ROUNDING, TIMES_DRAWS, TIMES_PRECISE = 30.0, 4.0, 2.0
_BUNDLE = 2**23  # elements that are sent together

Take = Callable[[str, Tensor], None]  # of a gradient by its name, whole


class Difference(NamedTuple):
    """Norms of the difference of one parameter's gradients, and of the reference; which is not finite."""

    name: str
    distance: float
    norm: float
    reference_overflows: bool = False
    plan_overflows: bool = False

    @property
    def relative(self) -> float:
        if self.distance == 0:
            return 0.0
        return self.distance / self.norm if self.norm else float("inf")


@final
class Comparison:
    """Compares gradients that come one after the other, on all ranks alike, with boxes that ranks hold of
    others: a plan's, multiplied by `factor`, or kept ones. `is_divided`: no two ranks hold the same."""

    def __init__(self, owned: Sequence[OwnedSlice], factor: float = 1.0, *, is_divided: bool = False) -> None:
        self._factor, self._is_divided = factor, is_divided
        self._boxes: dict[str, list[OwnedSlice]] = {}
        for each in owned:
            self._boxes.setdefault(each.slice.name, []).append(each)
        self._rows: dict[str, Tensor] = {}

    def take(self, name: str, whole: Tensor) -> None:
        self._rows[name] = _compare(self._boxes.get(name, []), whole, self._factor)

    def differences(self, group: Group | None) -> list[Difference]:
        """On all ranks alike, which have taken the same."""
        if not self._rows:
            return []
        numbers = torch.stack(list(self._rows.values()))
        if group is not None:
            if self._is_divided:
                numbers[:, 1] /= group.size  # norms, which all ranks have whole
            with group.ledger.about("checks"):
                group.all_reduce(numbers, "sum" if self._is_divided else "max")
        table: list[list[float]] = numbers.tolist()
        return [
            # Where no rank has a gradient, all of the reference is missing.
            Difference(name, (distance if is_held else norm) ** 0.5, norm**0.5, *map(bool, overflows))
            for name, (distance, norm, is_held, *overflows) in zip(self._rows, table, strict=True)
        ]


@final
class KeptGradients:
    """Gradients of one device, added up: each rank keeps an equal part of every one."""

    def __init__(self, group: Group | None) -> None:
        self._rank, self._size = (0, 1) if group is None else (group.rank, group.size)
        self._runs: dict[str, tuple[Tensor, list[Slice]]] = {}

    def take(self, name: str, whole: Tensor) -> None:
        begin, end = (whole.numel() * part // self._size for part in (self._rank, self._rank + 1))
        run = whole.flatten()[begin:end]
        if name in self._runs:
            self._runs[name][0].add_(run)
        else:
            self._runs[name] = run.clone(), run_slices(name, tuple(whole.shape), begin, end)

    def comparison(self, factor: float = 1.0) -> Comparison:
        owned = [box for run, slices in self._runs.values() for box in own_run(run, slices)]
        return Comparison(owned, factor, is_divided=True)


def share_gradients(
    gradients: Mapping[str, Tensor],
    likes: Mapping[str, Tensor],
    group: Group | None,
    device: torch.device,
    take: Take,
) -> None:
    """Every rank takes what rank 0 has of `gradients`; zeros where there is none. `likes`: tensors of the
    meta device, for all that may have a gradient."""
    for names in _bundles(likes):
        tensors = [
            gradients[name].to(likes[name].dtype).flatten()
            if name in gradients
            else torch.zeros(likes[name].numel(), dtype=likes[name].dtype)
            for name in names
        ]
        bundle = torch.cat([tensor.to(device) for tensor in tensors])
        if group is not None and len(bundle):
            with group.ledger.about("checks"):
                group.broadcast(torch.view_as_real(bundle) if bundle.is_complex() else bundle)
        for name, part in zip(names, bundle.split([likes[name].numel() for name in names]), strict=True):
            take(name, part.view(likes[name].shape))


def _bundles(likes: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Group names of one type, whose tensors are sent together."""
    for dtype in dict.fromkeys(like.dtype for like in likes.values()):
        names: list[str] = []
        for name in sorted(name for name, like in likes.items() if like.dtype == dtype):
            if names and sum(likes[each].numel() for each in (*names, name)) > _BUNDLE:
                yield names
                names = []
            names.append(name)
        yield names


def _compare(boxes: Sequence[OwnedSlice], whole: Tensor, factor: float) -> Tensor:
    """Return (squared distance, squared norm, whether there is a gradient here, whether `whole` is not
    finite, whether boxes are not). NaN is infinitely far from a number, and at no distance from NaN."""
    distance, overflow = torch.zeros(2, dtype=torch.float64, device=whole.device)
    for each in boxes:
        part, own = whole[each.slice.box], each.tensor.to(whole.dtype) * factor
        gap = torch.where((part == own) | (part.isnan() & own.isnan()), 0, part - own).abs()
        distance = distance + gap.nan_to_num(torch.inf, torch.inf).square().sum(dtype=torch.float64)
        overflow = overflow.maximum((~own.isfinite()).any())
    norm = whole.abs().nan_to_num(0.0, 0.0).square().sum(dtype=torch.float64)
    is_held, overflows = torch.full_like(norm, float(bool(boxes))), (~whole.isfinite()).any().double()
    return torch.stack([distance, norm, is_held, overflows, overflow])
