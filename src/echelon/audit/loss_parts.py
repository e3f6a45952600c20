"""Whether a loss adds up over samples: the loss of some samples together against the sum over single ones.

A plan cuts the batch, and adds up totals and counts of the parts. That is the loss of the whole batch only if
each sample adds something of its own to both. A mean that leaves out targets, or weighs them, does not: parts
count differently. The first batch may not show it, so a few made-up targets are asked too.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from echelon.audit.samples import map_tensors, rounding, select
from echelon.targets import IGNORED_TARGET

Loss = Callable[[Any, Any], Any]  # (output, targets) -> a mean over samples, or (total, count)
Piece = tuple[Any, Any, int]  # an output, its targets, and how many samples they are of

_BYTES = 2**26  # of an output in float64
_SINGLES = 8  # samples that are asked one by one
_TOLERANCE = 1e-5  # relative, in float64: a loss may compute in float32

FIX = (
    "return (total, count) from the loss: the sum over samples or targets, and how many (or their weights) "
    "it is the sum of"
)


class Batch(NamedTuple):
    """An output of `samples` samples with its targets; `dims` says where each tensor counts them."""

    output: Any
    targets: Any
    dims: Sequence[int | None]
    target_dims: Sequence[int | None]
    samples: int

    def part(self, begin: int, end: int) -> Piece:
        output = select(self.output, self.dims, begin, end, self.samples)
        return output, self.targets_of(begin, end), end - begin

    @property
    def is_cut(self) -> bool:
        """Whether every tensor counts samples, of which there are several."""
        return self.samples > 1 and all(dim is not None for dim in (*self.dims, *self.target_dims))

    def pair_on_host(self) -> "Batch":
        """The first two samples: a device ends the process where a made-up target is no class."""
        output, targets = (map_tensors(_to_host, each) for each in self.part(0, 2)[:2])
        return self._replace(output=output, targets=targets, samples=2)

    def targets_of(self, begin: int, end: int) -> Any:
        return select(self.targets, self.target_dims, begin, end, self.samples)


class Sums(NamedTuple):
    """The loss of samples together, and summed over parts: (total, count) each."""

    whole: tuple[float, float]
    parts: tuple[float, float]

    def describe(self) -> str:
        together, by_parts = (total / count if count else 0.0 for total, count in self)
        if math.isclose(self.whole[1], self.parts[1], rel_tol=_TOLERANCE):
            return f"{together:.6g} together and {by_parts:.6g} as the mean over parts"
        return (
            f"{together:.6g} over a count of {self.whole[1]:g} together, and {by_parts:.6g} over a count of "
            f"{self.parts[1]:g} in parts"
        )


class LossRefusedError(Exception):
    """A loss cannot be called on some part; the text is the headline of its own error."""


def call_loss(loss: Loss, output: Any, targets: Any) -> Any:
    """What the loss returns. Only what it raises itself becomes a LossRefusedError."""
    try:
        return loss(output, targets)
    except Exception as error:  # of whatever a user's loss does
        raise LossRefusedError(f"{type(error).__name__}: {error}".splitlines()[0]) from error


def as_numbers(result: Any) -> tuple[float, float]:
    """(total, count) of a loss, or (mean, 1)."""
    pair = result if isinstance(result, tuple) else (result, 1)
    if len(pair) != 2 or not all(map(_is_number, pair)):
        raise LossRefusedError("it returns neither a number nor (total, count)")
    return float(pair[0]), float(pair[1])


@final
class LossParts:
    """Compares one loss with itself. Methods raise a LossRefusedError where it cannot be asked."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss

    def difference(self, batch: Batch) -> Sums | None:
        """The loss of the batch, and of its samples one by one, if they differ by more than rounding."""
        if not batch.is_cut:
            return None
        count = min(batch.samples, _SINGLES, max(2, _BYTES // max(1, _bytes_per_sample(batch))))
        groups = [[(number, number + 1) for number in range(count)]]
        if count > 2:
            groups.append([(0, count // 2), (count // 2, count)])
        refusals: list[LossRefusedError] = []
        for bounds in groups:
            try:
                sums = self._compare(batch, count, bounds)
            except LossRefusedError as refusal:  # it may take no single samples, but halves
                refusals.append(refusal)
                continue
            if sums is not None:
                return sums
        if len(refusals) == len(groups):
            raise refusals[-1]
        return None

    def _compare(self, batch: Batch, count: int, bounds: Iterable[tuple[int, int]]) -> Sums | None:
        whole = batch.part(0, count)
        parts = [batch.part(*each) for each in bounds]
        return self.compare(whole, parts)

    def compare(
        self, whole: Piece, parts: Sequence[Piece], *, widths: Sequence[bool] = (True, False)
    ) -> Sums | None:
        """Both, if they differ: in float64, or else (`widths`) in the types that the loss is used to."""
        *others, last = widths
        for wide in others:
            try:
                return self._compare_in(whole, parts, wide=wide)
            except LossRefusedError:  # of this type; it may take another
                continue
        return self._compare_in(whole, parts, wide=last)

    def _compare_in(self, whole: Piece, parts: Sequence[Piece], *, wide: bool) -> Sums | None:
        sums = self.sums(whole, wide=wide), [self.sums(part, wide=wide) for part in parts]
        given = max((rounding(leaf.dtype) for leaf in _tensors(whole[0])), default=_TOLERANCE)
        return compare_sums(*sums, _TOLERANCE if wide else given)

    @torch.no_grad()
    def sums(self, piece: Piece, *, wide: bool = True) -> tuple[float, float]:
        """(total, count) of an output and its targets, which the loss may change."""
        output, targets = (map_tensors(_wide if wide else Tensor.clone, each) for each in piece[:2])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of single samples
            result = call_loss(self._loss, output, targets)
        total, count = as_numbers(result)
        return (total, count) if isinstance(result, tuple) else (total * piece[2], float(piece[2]))

    @torch.no_grad()
    def returns_count(self, output: Any, targets: Any) -> bool:
        """Whether it is (total, count), and not a mean over samples."""
        result = call_loss(self._loss, *(map_tensors(Tensor.clone, each) for each in (output, targets)))
        return isinstance(result, tuple)

    # Targets that count less than others.

    def special_targets(self, batch: Batch, values: Iterable[int], usual: int) -> list[int]:
        """Those of `values` that the loss leaves out, or gives another weight than the `usual` target. It may
        refuse one of them, as no class; not the targets of the batch.
        """
        if not batch.is_cut:
            return []
        pair = batch.pair_on_host()
        self.compare(pair.part(0, 2), [pair.part(n, n + 1) for n in range(2)])
        return [value for value in values if value != usual and self._is_special(pair, value, usual)]

    def _is_special(self, pair: Batch, value: int, usual: int) -> bool:
        """Whether sample 0 adds less where its first half of targets is `value`, sample 1 only `usual`."""

        def replace(leaf: Tensor) -> Tensor:
            if leaf.dtype != torch.int64:
                return leaf
            made_up = torch.full_like(leaf, usual)
            first = made_up[0].view(-1)
            first[: -(-len(first) // 2)] = value
            return made_up

        made_up = pair._replace(targets=map_tensors(replace, pair.targets))
        try:
            return self.compare(made_up.part(0, 2), [made_up.part(n, n + 1) for n in range(2)]) is not None
        except LossRefusedError:
            return False


def compare_sums(
    whole: tuple[float, float], parts: Sequence[tuple[float, float]], tolerance: float
) -> Sums | None:
    """Both, if total or count of the parts is not that of the whole."""
    totals, counts = ([part[place] for part in parts] for place in range(2))
    if not math.isfinite(whole[0]):
        return None  # what overflows together says nothing
    total, count = sum(totals), sum(counts)
    size = max(abs(whole[0]), sum(map(abs, totals)))
    near = abs(whole[0] - total) <= tolerance * size and abs(whole[1] - count) <= tolerance * abs(whole[1])
    if near:
        return None
    return Sums(whole, (total, count))


def message(sums: Sums, plan: str) -> str:
    """What users read of a loss that does not add up."""
    return (
        f"plan '{plan}' cuts the batch, and the loss does not add up over samples: that of the first "
        f"microbatch is {sums.describe()}. Likely it is a mean that leaves out or weighs targets "
        f"(ignore_index, weight=…), or compares samples with each other (contrastive losses). {FIX}; a loss "
        "over pairs of samples needs microbatches=1 data=1; audit='off' if it is meant"
    )


# Targets that a mean leaves out, in later batches.


def candidates(loss: object) -> list[int]:
    """Targets that losses leave out by habit, the same on every rank."""
    return list(dict.fromkeys([*likely_candidates(loss), 0]))


def likely_candidates(loss: object) -> list[int]:
    """Those that are no class, or that the loss names itself."""
    own = getattr(loss, "ignore_index", IGNORED_TARGET)
    return list(dict.fromkeys([IGNORED_TARGET, -1, own if isinstance(own, int) else IGNORED_TARGET]))


def num_special(targets: Any, special: Sequence[int]) -> Tensor | None:
    """How many special targets each sample has; None where no tensor holds integers."""
    counts: Tensor | None = None
    for leaf in _tensors(targets):
        if leaf.dtype == torch.int64 and len(leaf):
            is_special = torch.stack([leaf == value for value in special]).any(0)
            number = is_special.reshape(len(leaf), -1).sum(1)
            counts = number if counts is None else counts + number
    return counts


def special_message(special: Sequence[int], least: int, most: int, plan: str) -> str:
    names = " and ".join(map(str, special))
    return (
        f"plan '{plan}' cuts the batch, and the loss is a mean that leaves out targets of {names}, of which "
        f"one sample has {least} and another {most}: parts of the batch count differently, and the mean of "
        f"their means is not the mean of all; {FIX} (as echelon.models.cross_entropy does); audit='off' if "
        "it is meant"
    )


def own_special_message(special: Sequence[int], least: int, most: int, plan: str) -> str:
    """Of a loss that the model computes itself."""
    names = " or ".join(map(str, special))
    return (
        f"plan '{plan}' cuts the batch, and the model returns its own loss, a mean that likely leaves out "
        f"targets of {names}, of which one sample has {least} and another {most}: parts of the batch count "
        "differently, and the mean of their means is not the mean of all; give parallelize a loss of the "
        "model's logits that returns (total, count), like echelon.models.cross_entropy; audit='off' if its "
        "mean is over samples"
    )


def weights_message(names: str, plan: str) -> str:
    return (
        f"plan '{plan}' cuts the batch, and the loss is a mean that weighs targets of {names} differently: "
        "parts of the batch have different sums of weights, and the mean of their means is not the mean of "
        f"all; {FIX}, like (cross_entropy(…, weight=w, reduction='sum'), w[targets].sum()); audit='off' if "
        "it is meant"
    )


def usual_values(targets: Any, special: Sequence[int], count: int = 6) -> list[int]:
    """A few of the classes among targets."""
    found: dict[int, None] = {}
    for leaf in _tensors(targets):
        if leaf.dtype == torch.int64:
            found |= dict.fromkeys(leaf.flatten()[:4096].unique()[: count + len(special)].tolist())
    return [value for value in found if value not in special][:count]


def _tensors(structure: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(structure) if isinstance(leaf, Tensor)]


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


def _wide(leaf: Tensor) -> Tensor:
    return leaf.detach().to(torch.float64 if leaf.is_floating_point() else leaf.dtype, copy=True)


def _to_host(leaf: Tensor) -> Tensor:
    return leaf.detach().cpu()


def _bytes_per_sample(batch: Batch) -> int:
    return sum(leaf.numel() for leaf in _tensors(batch.output)) * 8 // batch.samples
