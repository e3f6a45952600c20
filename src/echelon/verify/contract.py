"""The equality contract: a plan trains to the same weights as one device, proven in float64.

`verify` trains twice, with the plan on real processes and on one device in plain torch, and compares every
weight, every optimizer state, every loss and gradient norm. Float64, because there rounding cannot hide a
mistake: two-rank data parallelism differs by 3e-12 in float64 and by 1e-3 in float32.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from echelon.engine import TRAINING_MODULES, parallelize
from echelon.launching import launch, preload
from echelon.plan import Plan
from echelon.verify.plants import PLANTS
from echelon.verify.reference import Trained, train_on_one_device

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Case:
    """One training to be held against one device. Functions must be importable, as for `launch`."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], tuple[Any, Any]]  # the global batch of a step
    loss: Callable[[Any, Any], Any]
    make_optimizer: Callable[[Any], torch.optim.Optimizer]
    steps: int = 20
    clip: float | None = 1.0
    seed: int = 0

    def build(self) -> nn.Module:
        """The model, initialised from the case's seed, in float64."""
        torch.manual_seed(self.seed)
        return self.make_model().double()

    def batches(self) -> list[tuple[Any, Any]]:
        return [_to_double(self.make_batch(step)) for step in range(self.steps)]


@dataclass(frozen=True)
class Verdict:
    """How far a plan's training ended from one device's: the largest absolute difference of each thing."""

    plan: Plan
    steps: int
    tensors: dict[str, float]  # by "name" for weights, "name exp_avg" for optimizer state
    numbers: dict[str, float]  # "loss", "grad_norm" over all steps
    tolerance: float = TOLERANCE

    @property
    def worst(self) -> tuple[str, float]:
        """What differs the most, and by how much; a tensor, unless only a number is out of bounds."""
        name, gap = max(self.tensors.items(), key=_badness)
        number, its_gap = max(self.numbers.items(), key=_badness)
        return (number, its_gap) if gap <= self.tolerance and not its_gap <= self.tolerance else (name, gap)

    @property
    def equal(self) -> bool:
        return self.worst[1] <= self.tolerance  # false for not-a-number too

    @property
    def num_wrong(self) -> int:
        return sum(not gap <= self.tolerance for gap in [*self.tensors.values(), *self.numbers.values()])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        name, gap = self.worst
        return {
            "plan": str(self.plan),
            "equal": self.equal,
            "worst": {"name": name, "error": gap if math.isfinite(gap) else str(gap)},
            "tolerance": self.tolerance,
            "steps": self.steps,
            "num_compared": len(self.tensors) + len(self.numbers),
            "num_wrong": self.num_wrong,
        }

    def __str__(self) -> str:
        name, gap = self.worst
        after = f"after {self.steps} steps in float64"
        if self.equal:
            return (
                f"'{self.plan}' is equal to one device {after}: largest difference {gap:.1e} ({name}), "
                f"allowed {self.tolerance:.0e}"
            )
        return (
            f"'{self.plan}' DIFFERS from one device {after}: worst is {name}, by {gap:.1e}, "
            f"allowed {self.tolerance:.0e}; {self.num_wrong} of "
            f"{len(self.tensors) + len(self.numbers)} values are out of bounds"
        )


def _badness(item: tuple[str, float]) -> float:
    return math.inf if math.isnan(item[1]) else item[1]


def verify(
    case: Case, plan: Plan | str, *, tolerance: float = TOLERANCE, plant: str | None = None
) -> Verdict:
    """Train `case` with `plan` on real processes and on one device; compare everything.

    `plant` puts a known mistake into the parallel training (see plants.py): the verdict must find it.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    exact = dataclasses.replace(plan, precision="fp64")
    preload(*TRAINING_MODULES)
    ranks = launch(_train_rank, exact.ranks, case, exact, plant)
    reference = train_on_one_device(case.build(), case.make_optimizer, case.loss, case.batches(), case.clip)
    tensors = dict(_tensor_gaps(ranks[0], reference)) | dict(_disagreements(ranks))
    numbers = {
        "loss": _gap(_doubles(ranks[0].losses), _doubles(reference.losses)),
        "grad_norm": _gap(_doubles(ranks[0].grad_norms), _doubles(reference.grad_norms)),
    }
    return Verdict(plan, case.steps, tensors, numbers, tolerance)


def assert_equal(case: Case, plan: Plan | str, *, tolerance: float = TOLERANCE) -> Verdict:
    """`verify` for tests: raises AssertionError with the verdict when the plan differs."""
    verdict = verify(case, plan, tolerance=tolerance)
    assert verdict.equal, str(verdict)
    return verdict


def _train_rank(case: Case, plan: Plan, plant: str | None) -> Trained:
    """One rank's training under the plan. Rank 0 returns the whole state, the others its fingerprint."""
    engine = parallelize(case.build(), plan, optimizer=case.make_optimizer, loss=case.loss, clip=case.clip)
    if plant is not None:
        PLANTS[plant](engine)
    metrics = [engine.step(engine.local(batch)) for batch in case.batches()]
    weights, optimizer = engine.full_state_dict(), engine.full_optimizer_state()
    if engine.mesh.rank != 0:
        weights = {name: _fingerprint(value) for name, value in weights.items()}
        optimizer = {}
    return Trained(weights, optimizer, [m.loss for m in metrics], [m.grad_norm for m in metrics])


def _tensor_gaps(trained: Trained, reference: Trained) -> Iterator[tuple[str, float]]:
    """The largest absolute difference of every weight and every optimizer state."""
    yield from _gaps(trained.weights, reference.weights, "")
    for name in sorted(reference.optimizer.keys() | trained.optimizer.keys()):
        mine, theirs = trained.optimizer.get(name, {}), reference.optimizer.get(name, {})
        yield from _gaps(mine, theirs, f"{name} ")


def _gaps(mine: dict[str, Tensor], theirs: dict[str, Tensor], prefix: str) -> Iterator[tuple[str, float]]:
    for name in sorted(mine.keys() | theirs.keys()):
        both = name in mine and name in theirs
        yield prefix + name, _gap(mine[name], theirs[name]) if both else float("inf")


def _gap(mine: Tensor, theirs: Tensor) -> float:
    if mine.shape != theirs.shape:
        return float("inf")
    return float((mine.double() - theirs.double()).abs().max()) if mine.numel() else 0.0


def _disagreements(ranks: list[Trained]) -> Iterator[tuple[str, float]]:
    """What some rank sees otherwise than rank 0: every rank must report the same, to the bit."""
    first = ranks[0]
    for rank, other in enumerate(ranks[1:], start=1):
        for name, value in other.weights.items():
            if not torch.equal(value, _fingerprint(first.weights[name])):
                yield f"{name} on rank {rank}", math.inf
        if (other.losses, other.grad_norms) != (first.losses, first.grad_norms):
            yield f"loss or grad_norm on rank {rank}", math.inf


def _fingerprint(value: Tensor) -> Tensor:
    """Two whole numbers over the bits of every element: in whatever order they are added, always the same."""
    bits = value.detach().double().flatten().view(torch.int64)
    return torch.stack([bits.sum(), (bits * torch.arange(1, bits.numel() + 1)).sum()])


def _to_double(batch: tuple[Any, Any]) -> tuple[Any, Any]:
    def convert(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    converted: tuple[Any, Any] = tree_map(convert, batch)
    return converted


def _doubles(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
