"""The equality contract: a plan trains to the same weights as one device, proven in float64.

`verify` trains twice, with the plan on real processes and on one device in plain torch, and compares every
weight, every optimizer state, every loss and gradient norm. Float64, because there rounding cannot hide a
mistake: two-rank data parallelism differs by 3e-12 in float64 and by 1e-3 in float32.
"""

import dataclasses
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon.engine import TRAINING_MODULES, parallelize
from echelon.engine.auto import ranks_here
from echelon.engine.support import refuse_unsupported
from echelon.errors import UserError
from echelon.fingerprint import fingerprint
from echelon.launching import Ranks, launch, preload
from echelon.plan import Plan
from echelon.program import ASYNCHRONOUS
from echelon.verify.case import Case
from echelon.verify.pipedream import train_by_formula
from echelon.verify.plants import PLANTS, Plant
from echelon.verify.reference import Trained, train_on_one_device
from echelon.verify.replay import replay

TOLERANCE = 1e-9
ONE_DEVICE = "one device"
_LOG, _FORMULA = "the replay of its own log", "its formula, replayed on one process"

_DEADLINE = 300.0  # seconds without a sign of life


@dataclass(frozen=True)
class Verdict:
    """How far a plan's training ended from one device's: the largest absolute difference of each thing."""

    plan: Plan
    steps: int
    tensors: dict[str, float]  # by "name" for weights, "name exp_avg" for optimizer state
    numbers: dict[str, float]  # "loss", "grad_norm" over all steps, "evaluation" after them
    tolerance: float = TOLERANCE
    against: str = ONE_DEVICE

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
            "against": self.against,
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
                f"'{self.plan}' is equal to {self.against} {after}: largest difference {gap:.1e} ({name}), "
                f"allowed {self.tolerance:.0e}"
            )
        return (
            f"'{self.plan}' DIFFERS from {self.against} {after}: worst is {name}, by {gap:.1e}, "
            f"allowed {self.tolerance:.0e}; {self.num_wrong} of "
            f"{len(self.tensors) + len(self.numbers)} values are out of bounds"
        )


def _badness(item: tuple[str, float]) -> float:
    return math.inf if math.isnan(item[1]) else item[1]


def verify(
    case: Case,
    plan: Plan | str,
    *,
    tolerance: float = TOLERANCE,
    plant: str | Plant | None = None,
    ranks: Ranks | None = None,
) -> Verdict:
    """Train `case` with `plan` on real processes and on one device; compare everything.

    Asynchronous training has a meaning of its own, which its log tells: that is replayed on one process.
    `plant` puts a known mistake into the parallel training (by name, see plants.py; or a function of the
    engine): the verdict must find it. `ranks` are processes that are there already, as many as the plan
    takes; with pipeline=auto, any number. Without them it starts its own, which takes longer.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    refuse_unsupported(plan)
    if plant is not None and plan.data == 1:
        raise UserError(f"--plant {plant} with '{plan}': the bug is one between replicas; set data=2 or more")
    exact = dataclasses.replace(plan, precision="fp64")
    trained = _train(ranks, case, exact, plant)
    first = trained[0]
    plan = dataclasses.replace(Plan.parse(first.plan), precision=plan.precision)  # without `auto`
    reference, against = _reference(case, plan, first)
    _refuse_standstill(case, reference)
    tensors = dict(_tensor_gaps(first, reference)) | dict(_disagreements(trained, against))
    numbers = {"evaluation": _gap(_doubles([first.evaluation]), _doubles([reference.evaluation]))}
    if against != _LOG:  # where the losses of steps are each worker's own
        numbers["loss"] = _gap(_doubles(first.losses), _doubles(reference.losses))
    if against == ONE_DEVICE:
        numbers["grad_norm"] = _gap(_doubles(first.grad_norms), _doubles(reference.grad_norms))
    return Verdict(plan, case.steps, tensors, numbers, tolerance, against)


def _train(ranks: Ranks | None, case: Case, plan: Plan, plant: str | Plant | None) -> list[Trained]:
    """What each rank's training left: on `ranks`, or on new ones."""
    if ranks is not None:
        return ranks.run(_train_rank, case, plan, plant)
    preload(*TRAINING_MODULES)
    return launch(_train_rank, ranks_here(plan), case, plan, plant, deadline=_DEADLINE)


def _reference(case: Case, plan: Plan, ran: Trained) -> tuple[Trained, str]:
    """What a plan must be equal to, and its name."""
    if plan.sync == "async" and plan.staleness > 0:
        return replay(ran.log, case, plan.data), _LOG
    if plan.schedule in ASYNCHRONOUS:
        return train_by_formula(case, plan, ran.boundaries), _FORMULA
    trained = train_on_one_device(
        case.build(), case.make_optimizer, case.loss, case.batches(), case.clip, case.seed
    )
    return trained, ONE_DEVICE


def assert_equal(case: Case, plan: Plan | str, *, tolerance: float = TOLERANCE) -> Verdict:
    """`verify` for tests: raises AssertionError with the verdict when the plan differs."""
    verdict = verify(case, plan, tolerance=tolerance)
    assert verdict.equal, str(verdict)
    return verdict


def _train_rank(case: Case, plan: Plan, plant: str | Plant | None) -> Trained:
    """One rank's training under the plan. Rank 0 returns the whole state, the others its fingerprint."""
    rank = int(os.environ["RANK"])
    batches = case.batches()
    engine = parallelize(
        case.build(rank),
        plan,
        optimizer=case.make_optimizer,
        loss=case.loss,
        clip=case.clip,
        seed=case.seed,
        example=batches[0],
        **case.options,
    )
    if plant is not None:
        (PLANTS[plant] if isinstance(plant, str) else plant)(engine)
    metrics = [engine.step(engine.local(batch)) for batch in batches]
    weights, optimizer = engine.full_state_dict(), engine.full_optimizer_state()
    if rank != 0:
        weights = _fingerprints(weights)
        optimizer = {name: _fingerprints(state) for name, state in optimizer.items()}
    evaluation = engine.evaluate(engine.local(batches[-1])).loss
    losses, norms = [m.loss for m in metrics], [m.grad_norm for m in metrics]
    return Trained(
        weights, optimizer, losses, norms, evaluation, engine.log(), str(engine.plan), engine.boundaries
    )


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
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return float("inf")
    if mine.is_complex():
        mine, theirs = torch.view_as_real(mine), torch.view_as_real(theirs)
    return float((mine.double() - theirs.double()).abs().max()) if mine.numel() else 0.0


def _disagreements(ranks: list[Trained], against: str) -> Iterator[tuple[str, float]]:
    """What some rank sees otherwise than rank 0: every rank must report the same, to the bit.

    Only the numbers of an asynchronous worker's steps are its own.
    """
    first = {"": _fingerprints(ranks[0].weights)}
    first |= {f"{name} ": _fingerprints(state) for name, state in ranks[0].optimizer.items()}
    for rank, other in enumerate(ranks[1:], start=1):
        for prefix, theirs in {"": other.weights, **{f"{n} ": s for n, s in other.optimizer.items()}}.items():
            mine = first.get(prefix, {})
            for name in sorted(mine.keys() | theirs.keys()):
                if name not in mine or name not in theirs or not torch.equal(mine[name], theirs[name]):
                    yield f"{prefix}{name} on rank {rank}", math.inf
        if against != _LOG and other.numbers != ranks[0].numbers:
            yield f"loss or grad_norm on rank {rank}", math.inf


def _refuse_standstill(case: Case, reference: Trained) -> None:
    """Two trainings that change nothing are equal, and prove nothing."""
    start = case.build().state_dict()
    if all(torch.equal(value, start[name]) for name, value in reference.weights.items()):
        raise UserError(
            f"after {case.steps} steps of the reference no weight has moved, so equality proves nothing; "
            "train for more steps, or with a learning rate above 0"
        )


def _fingerprints(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two whole numbers over the bits of each tensor."""
    return {name: torch.tensor(fingerprint(value)) for name, value in tensors.items()}


def _doubles(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
