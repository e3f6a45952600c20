"""The contract in bf16 and fp16: a plan may be no further from one device in that type than that is from
float32.

In bf16 no two ways to train are equal: every sum is rounded to three digits, in fp16 to four. How far apart
they may end is measured, by three trainings of one case from the same weights:

    A  one device in float32
    B  one device in bf16, with float32 masters     B to A: what rounding alone does
    C  the plan in bf16, with float32 masters       C to B: must not be more

In fp16 all three skip the same steps: those in which gradients of B, times its loss scale, are not finite.
The loss scale of each step must be the same in B and C, exactly.

The distance of x and y is ‖x − y‖ / (‖x‖ + ‖y‖): 0 where they are equal, 1/3 where one is twice the other,
never above 1. For weights and masters, x and y are what training has added to the start.

Both distances are samples of a random quantity, and a plan rounds where one device does not: the gradient of
each microbatch, and with gradients=same their sums. So C to B may be a few times B to A, and a few roundings
of the type more (`_allowed`). Rounding itself keeps well below, bugs do not. Where one sample says too little
(a number so near to the zero of a ReLU that rounding decides on which side it is), further ones are taken: B
again, with outputs of its modules changed as rounding might. Trainings drift apart from step to step, until
nothing can be told from rounding: such a comparison is refused.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.nn.batch import DTYPES
from echelon.plan import Plan
from echelon.state.ownership import MASTER
from echelon.verify.reference import TrainingResult
from echelon.verify.verdict import LOG, is_alike, named_tensors, number_lists, rank_gaps

WEIGHTS = "weights"  # the kind of all that is in the state dict
_LARGEST_ROUNDING = 0.1  # three times that is less than the distance from an update of twice the size
_MOST_BY_CHANCE = 0.05  # four times that is less than a number of twice the size is away
_FLOAT32_ROUNDING = 2.0**-20  # of a number, by sums in another order: a few times the precision of float32


class Distance(NamedTuple):
    """The distance of the plan from one device in its type, the distance of that from float32, the bound."""

    plan: float
    rounding: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.plan <= self.allowed  # false for NaN too

    @property
    def excess(self) -> float:
        """The plan's distance in units of what is allowed."""
        if self.plan == 0.0:
            return 0.0
        excess = self.plan / self.allowed if self.allowed else math.inf
        return math.inf if math.isnan(excess) else excess

    def to_dict(self) -> dict[str, float | str]:
        return {name: value if math.isfinite(value) else str(value) for name, value in self._asdict().items()}

    def __str__(self) -> str:
        return f"{self.plan:.1e} (rounding {self.rounding:.1e}, allowed {self.allowed:.1e})"


class _Norms(NamedTuple):
    """The norm of the difference of two changes, the norm of each, and the norm of what has changed."""

    gap: float
    first: float
    second: float
    value: float

    @property
    def distance(self) -> float:
        return self.gap / (self.first + self.second) if self.gap else 0.0

    @property
    def resolution(self) -> float:
        """The distance that float32 cannot resolve: large for a small change of a large value."""
        return _FLOAT32_ROUNDING * self.value / ((self.first + self.second) or 1.0)


_NEAR, _FAR = _Norms(0.0, 0.0, 0.0, 0.0), _Norms(math.inf, 1.0, 1.0, 0.0)


@dataclass(frozen=True)
class LowPrecisionVerdict:
    """The distance of a plan below float32 from one device in the same type."""

    plan: Plan
    steps: int
    groups: dict[str, Distance]  # by kind: "weights", "master", or a key of the optimizer state
    tensors: dict[str, Distance]  # by "name" for weights, "name exp_avg" for optimizer state
    # "loss 0", "grad_norm 0", … of each step, "evaluation 0" after the last; "skipped 0" and "loss_scale 0"
    # only of steps in which they differ
    numbers: dict[str, Distance]
    rank_differences: tuple[str, ...]  # what some rank reports differently from rank 0
    against: str

    def __post_init__(self) -> None:
        assert WEIGHTS in self.groups, "no weight was compared"
        assert self.tensors, "no tensor was compared"
        assert self.numbers, "no number was compared"

    @property
    def distances(self) -> dict[str, Distance]:
        groups = {f"all {kind}": distance for kind, distance in self.groups.items()}
        return groups | self.tensors | self.numbers

    @property
    def worst(self) -> tuple[str, Distance]:
        """The largest distance, in units of what is allowed."""
        return max(self.distances.items(), key=lambda item: item[1].excess)

    @property
    def holds(self) -> bool:
        return self.num_wrong == 0

    @property
    def num_wrong(self) -> int:
        return sum(not distance.holds for distance in self.distances.values()) + len(self.rank_differences)

    def to_dict(self) -> dict[str, Any]:
        name, worst = self.worst
        return {
            "plan": str(self.plan),
            "against": self.against,
            "holds": self.holds,
            "weights": self.groups[WEIGHTS].to_dict(),
            "worst": {"name": name, **worst.to_dict()},
            "rank_differences": list(self.rank_differences),
            "steps": self.steps,
            "num_compared": len(self.distances),
            "num_wrong": self.num_wrong,
        }

    def __str__(self) -> str:
        name, worst = self.worst
        after = f"{self.against} in {self.plan.precision} after {self.steps} steps"
        measured = f"weights differ by {self.groups[WEIGHTS]}; worst is {name}, by {worst}"
        if self.holds:
            return f"'{self.plan}' is within rounding of {after}: {measured}"
        ranks = f"ranks differ in {', '.join(self.rank_differences[:3])}; " if self.rank_differences else ""
        return (
            f"'{self.plan}' is NOT within rounding of {after}: {measured}; {ranks}{self.num_wrong} of "
            f"{len(self.distances)} values are out of bounds"
        )


def compare_low_precision(
    results: Sequence[TrainingResult],
    rounded: TrainingResult,
    exact: TrainingResult,
    start: Mapping[str, Tensor],
    steps: int,
    against: str,
    *,
    optimizer_rounding: float = 0.0,
    disturbed: Sequence[TrainingResult] = (),
) -> LowPrecisionVerdict:
    """Measure C to B and B to A: the `results` of all ranks, one device `rounded` and `exact`.

    `start` is the state dict before training; `optimizer_rounding` that of the type in which the optimizer
    computes, also in A. `disturbed`: further trainings of one device that B may be as far from as from A.
    """
    ran, differences = Plan.parse(results[0].plan), tuple(rank_gaps(results, against))
    unit = max(rounding_of(ran.precision), optimizer_rounding)
    near = (exact, *disturbed)
    plan_norms, samples = _measure(results[0], rounded, start), [_measure(rounded, n, start) for n in near]
    firsts, seconds = named_tensors(results[0]), named_tensors(rounded)
    common = firsts.keys() & seconds.keys()
    unlike = {name for name in common if not is_alike(firsts[name], seconds[name])}
    plan_norms |= dict.fromkeys(sorted((firsts.keys() ^ seconds.keys()) | unlike), _FAR)
    kinds: dict[str, list[str]] = {}
    for name in plan_norms:
        kinds.setdefault(WEIGHTS if name in start else name.rpartition(" ")[2], []).append(name)
    groups, tensors = {}, {}
    for kind, names in kinds.items():
        rounding = max(_combine(norms.get(name, _NEAR) for name in names).distance for norms in samples)
        plan = _combine(plan_norms[name] for name in names)
        groups[kind] = Distance(plan.distance, rounding, max(_allowed(rounding, unit), plan.resolution))
        for name in names:
            # A tensor may be small: chance moves its distances more than those of its kind.
            own, measured = max(norms.get(name, _NEAR).distance for norms in samples), plan_norms[name]
            allowed = 4 * _allowed(max(own, rounding), unit) if own else 0.0
            tensors[name] = Distance(measured.distance, own, max(allowed, measured.resolution))
    drift = _bounded_drift(groups, steps, ran.precision)
    numbers = _number_distances(results[0], rounded, near, against, unit, drift)
    return LowPrecisionVerdict(ran, steps, groups, tensors, numbers, differences, against)


def rounding_of(precision: str) -> float:
    """Return the rounding of a number, relative to it: 2**-8 in bf16, 2**-11 in fp16."""
    return torch.finfo(DTYPES[precision]).eps / 2


def _bounded_drift(groups: Mapping[str, Distance], steps: int, precision: str) -> float:
    """Return how far rounding has driven the training apart; refuse it where that is as large as a bug.

    Weights do not count: those that barely move are far from float32 because they themselves are rounded.
    """
    masters_and_state = {kind: distance for kind, distance in groups.items() if kind != WEIGHTS}
    if not masters_and_state:  # SGD without momentum, and without masters
        return 0.0
    kind, furthest = max(masters_and_state.items(), key=lambda item: item[1].rounding)
    if furthest.rounding > _LARGEST_ROUNDING:
        raise UserError(
            f"after {steps} steps one device in {precision} is {furthest.rounding:.2f} from float32 (all "
            f"{kind}): above {_LARGEST_ROUNDING}, rounding would hide a bug; use fewer steps, or a lower "
            "learning rate"
        )
    return furthest.rounding


def _origin(name: str, start: Mapping[str, Tensor]) -> Tensor:
    """Return the values from which training began: the start of a weight or its master, else zero."""
    weight = start.get(name.removesuffix(f" {MASTER}"))
    return torch.zeros(()) if weight is None else _real(weight)


def _allowed(rounding: float, unit: float) -> float:
    """Allow many elements together three times what rounding does, and four roundings of a number (`unit`).

    What rounding does not change, like counters and frozen weights, the plan may not change either.
    """
    return 3 * rounding + 4 * unit if rounding else 0.0


def _number_distances(
    result: TrainingResult,
    rounded: TrainingResult,
    near: Sequence[TrainingResult],
    against: str,
    unit: float,
    drift: float,
) -> dict[str, Distance]:
    """Differences of numbers grow from step to step, and so does what is allowed. By chance rounding changes
    a single number less than the training that it comes from: by `drift`, after updates."""
    distances = {}
    plan_lists, rounded_lists, *near_lists = (number_lists(r, against) for r in (result, rounded, *near))
    for name, expected in rounded_lists.items():
        if len(plan_lists[name]) != len(expected):
            distances[f"{name} of all steps"] = Distance(math.inf, 0.0, unit)
        largest = unit
        columns = (plan_lists[name], expected, *(lists[name] for lists in near_lists))
        for step, (c, b, *others) in enumerate(zip(*columns, strict=False)):
            rounding = max(_scalar_distance(b, other) for other in others)
            largest = max(rounding, largest, min(drift, _MOST_BY_CHANCE) if step else 0.0)
            distances[f"{name} {step}"] = Distance(_scalar_distance(c, b), rounding, 4 * largest)
    if against == LOG:  # asynchronous workers each have their own loss scale
        return distances
    exact: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "skipped": (result.skipped, rounded.skipped),
        "loss_scale": (result.loss_scales, rounded.loss_scales),
    }
    for name, both in exact.items():
        unlike = [step for step, (c, b) in enumerate(zip(*both, strict=True)) if c != b]
        distances |= {f"{name} {step}": Distance(math.inf, 0.0, 0.0) for step in unlike}
    return distances


def _scalar_distance(first: float, second: float) -> float:
    if first == second or (math.isnan(first) and math.isnan(second)):  # norms of skipped steps are infinite
        return 0.0
    return abs(first - second) / (abs(first) + abs(second))


def _combine(norms: Iterable[_Norms]) -> _Norms:
    return _Norms(*(math.hypot(*column) for column in zip(*norms, strict=True)))


def _measure(first: TrainingResult, second: TrainingResult, start: Mapping[str, Tensor]) -> dict[str, _Norms]:
    """The norms of each tensor that both have in the same shape."""
    firsts, seconds = named_tensors(first), named_tensors(second)
    norms = {}
    for name in sorted(firsts.keys() & seconds.keys()):
        if firsts[name].shape == seconds[name].shape:
            origin, value = _origin(name, start), _real(seconds[name])
            x, y = (_real(tensor) - origin for tensor in (firsts[name], seconds[name]))
            norms[name] = _Norms(*(float(each.norm()) for each in (x - y, x, y, value)))
    return norms


def _real(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
