"""The equality contract: a plan trains to the same weights as one device, proven in float64.

`verify` trains twice, with the plan on real processes and on one device in plain torch, and compares every
weight, every optimizer state, every loss and gradient norm. Float64, because there rounding cannot hide a
mistake: two-rank data parallelism differs by 3e-12 in float64 and by 1e-3 in float32.
"""

import dataclasses
import os
from collections.abc import Sequence

import torch

from echelon.engine import parallelize
from echelon.engine.auto import ranks_here
from echelon.engine.support import refuse_unsupported
from echelon.errors import UserError
from echelon.launching import TRAINING_MODULES, Ranks, launch, preload
from echelon.plan import ASYNCHRONOUS_SCHEDULES, Plan
from echelon.verify.case import Case
from echelon.verify.inject_bug import BUGS, Bug
from echelon.verify.pipedream import train_by_formula
from echelon.verify.reference import TrainingResult, train_on_one_device
from echelon.verify.replay import replay
from echelon.verify.verdict import (
    FORMULA,
    LOG,
    ONE_DEVICE,
    TOLERANCE,
    Verdict,
    fingerprints,
    number_gaps,
    rank_gaps,
    tensor_gaps,
)

_DEADLINE = 300.0  # seconds without a sign of life


def verify(
    case: Case,
    plan: Plan | str,
    *,
    tolerance: float = TOLERANCE,
    inject_bug: str | Bug | None = None,
    ranks: Ranks | None = None,
) -> Verdict:
    """Train `case` with `plan` on real processes and on one device; compare everything.

    Asynchronous training has a meaning of its own, which its log records: the log is replayed on one process.
    `inject_bug` breaks the parallel training in a known way (by name, see inject_bug.py; or a function of
    the engine): the verdict must find it. `ranks` are running processes to use, as many as the plan takes;
    with pipeline=auto, any number. Without them, `verify` starts its own, which takes longer.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    refuse_unsupported(plan)
    if inject_bug is not None and plan.data == 1:
        raise UserError(
            f"--inject-bug {inject_bug} with '{plan}': the bug is between replicas; set data=2 or more"
        )
    results = _train(ranks, case, dataclasses.replace(plan, precision="fp64"), inject_bug)
    verdict = judge(case, results, tolerance=tolerance)
    return dataclasses.replace(verdict, plan=dataclasses.replace(verdict.plan, precision=plan.precision))


def judge(case: Case, results: Sequence[TrainingResult], *, tolerance: float = TOLERANCE) -> Verdict:
    """Compare what every rank's training in float64 left with each other and with the reference."""
    plan = Plan.parse(results[0].plan)
    reference, against = _reference(case, plan, results[0])
    _refuse_standstill(case, reference)
    tensors = tensor_gaps(results[0], reference) | rank_gaps(results, against)
    numbers = number_gaps(results[0], reference, against)
    return Verdict(plan, case.steps, tensors, numbers, tolerance, against)


def assert_equal(case: Case, plan: Plan | str, *, tolerance: float = TOLERANCE) -> Verdict:
    """`verify` for tests: raises AssertionError with the verdict when the plan differs."""
    verdict = verify(case, plan, tolerance=tolerance)
    assert verdict.equal, str(verdict)
    return verdict


def train_rank(case: Case, plan: Plan, bug: str | Bug | None) -> TrainingResult:
    """One rank's training under the plan. Rank 0 returns the full state, the others its fingerprints."""
    rank = int(os.environ["RANK"])
    batches = case.batches()
    engine = parallelize(
        case.build(rank),
        plan,
        optimizer=case.make_optimizer,
        loss=case.loss,
        clip=case.clip,
        seed=case.seed,
        sample_batch=batches[0],
        **case.options,
    )
    if bug is not None:
        (BUGS[bug] if isinstance(bug, str) else bug)(engine)
    metrics = [engine.step(engine.local(batch)) for batch in batches]
    weights, optimizer = engine.full_state_dict(), engine.full_optimizer_state()
    if rank != 0:
        weights = fingerprints(weights)
        optimizer = {name: fingerprints(state) for name, state in optimizer.items()}
    result = TrainingResult(
        weights,
        optimizer,
        losses=[step.loss for step in metrics],
        grad_norms=[step.grad_norm for step in metrics],
        evaluation=engine.evaluate(engine.local(batches[-1])).loss,
        log=engine.log(),
        plan=str(engine.plan),
        boundaries=engine.boundaries,
    )
    engine.close(restore=False)
    return result


def _train(ranks: Ranks | None, case: Case, plan: Plan, bug: str | Bug | None) -> list[TrainingResult]:
    """What each rank's training left: on `ranks`, or on new ones."""
    if ranks is not None:
        return ranks.run(train_rank, case, plan, bug)
    preload(*TRAINING_MODULES)
    return launch(train_rank, ranks_here(plan), case, plan, bug, deadline=_DEADLINE)


def _reference(case: Case, plan: Plan, result: TrainingResult) -> tuple[TrainingResult, str]:
    """What the training of a plan must be equal to, and its name."""
    if plan.sync == "async" and plan.staleness > 0:
        return replay(result.log, case, plan.data), LOG
    if plan.schedule in ASYNCHRONOUS_SCHEDULES:
        return train_by_formula(case, plan, result.boundaries), FORMULA
    return train_on_one_device(case), ONE_DEVICE


def _refuse_standstill(case: Case, reference: TrainingResult) -> None:
    """Refuse a training that changes no weights: equality would be meaningless."""
    start = case.build().state_dict()
    if all(torch.equal(value, start[name]) for name, value in reference.weights.items()):
        raise UserError(
            f"after {case.steps} steps of the reference no weight has moved, so equality proves nothing; "
            "train for more steps, or with a learning rate above 0"
        )
