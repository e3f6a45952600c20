"""The equality contract: a plan trains to the same weights as one device, proven in float64.

`verify` trains twice, with the plan on real processes and on one device in plain torch, and compares every
weight, every optimizer state, every loss and gradient norm. Float64, because there rounding cannot hide a
mistake: two-rank data parallelism differs by 3e-12 in float64 and by 1e-3 in float32. What float64 does not
run, the float32 masters below float32, has a contract of its own (low_precision.py).
"""

import dataclasses
import functools
import os
from collections.abc import Collection, Sequence
from typing import Literal, get_args, overload

import torch
from torch import Tensor, nn

from echelon.collectives.agreement import ask_rank_0
from echelon.engine import Engine, Metrics, parallelize
from echelon.engine.audit.reference import disturbed_outputs
from echelon.engine.auto import ranks_here
from echelon.errors import UserError
from echelon.launching import TRAINING_MODULES, Ranks, launch, preload
from echelon.launching.torchrun import is_under_torchrun
from echelon.nn.batch import DTYPES
from echelon.plan import AUTO, Plan
from echelon.state.assembly import assemble
from echelon.state.ownership import MASTER
from echelon.verify.case import Case
from echelon.verify.inject_bug import Bug, check_bug, inject
from echelon.verify.low_precision import LowPrecisionVerdict, compare_low_precision, rounding_of
from echelon.verify.reference import TrainingResult, train_on_one_device
from echelon.verify.replay import replay, train_by_formula
from echelon.verify.verdict import (
    DELAYED,
    FORMULA,
    LOG,
    ONE_DEVICE,
    TOLERANCE,
    Verdict,
    kind_scales,
    number_gaps,
    rank_gaps,
    summarize,
    tensor_gaps,
)

Precision = Literal["fp64", "bf16", "fp16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)

_DEADLINE = 300.0  # seconds without a sign of life
_DRAWS = 3  # of rounding, before a plan below float32 counts as wrong


@overload
def verify(
    case: Case,
    plan: Plan | str,
    *,
    precision: Literal["fp64"] = ...,
    tolerance: float = ...,
    inject_bug: str | Bug | None = ...,
    ranks: Ranks | None = ...,
) -> Verdict: ...


@overload
def verify(
    case: Case,
    plan: Plan | str,
    *,
    precision: Literal["bf16", "fp16"],
    inject_bug: str | Bug | None = ...,
    ranks: Ranks | None = ...,
) -> LowPrecisionVerdict: ...


@overload
def verify(
    case: Case,
    plan: Plan | str,
    *,
    precision: Precision,
    tolerance: float = ...,
    inject_bug: str | Bug | None = ...,
    ranks: Ranks | None = ...,
) -> Verdict | LowPrecisionVerdict: ...


def verify(
    case: Case,
    plan: Plan | str,
    *,
    precision: Precision = "fp64",
    tolerance: float = TOLERANCE,
    inject_bug: str | Bug | None = None,
    ranks: Ranks | None = None,
) -> Verdict | LowPrecisionVerdict:
    """Train `case` with `plan` on real processes and on one device; compare everything.

    In float64 both must be equal, up to `tolerance`. With precision="bf16" or "fp16", the plan may be no
    further from one device in that type than that is from float32. Asynchronous training has a meaning of its
    own, which its log records: the log is replayed on one process. `inject_bug` breaks the parallel training
    in a known way (by name, see inject_bug.py; or a function of the engine): the verdict must find it.
    `ranks` are running processes to use, as many as the plan takes; with pipeline=auto, any number. Without
    them, `verify` starts its own, which takes longer. Under torchrun it trains on all ranks of that, and
    every rank returns the verdict.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    _check(plan, precision, inject_bug)
    if precision != "fp64":
        case = case.round_start(DTYPES[precision])
    gradients = "fp32" if precision == "fp64" else plan.gradients
    masters = precision == "fp64" or plan.masters
    trained = dataclasses.replace(plan, precision=precision, gradients=gradients, masters=masters)
    results = _train(ranks, case, trained, inject_bug)

    def compare() -> Verdict | LowPrecisionVerdict:
        if precision != "fp64":
            return judge_low_precision(case, results)
        verdict = judge(case, results, tolerance=tolerance)
        ran = dataclasses.replace(
            verdict.plan, precision=plan.precision, gradients=plan.gradients, masters=plan.masters
        )
        return dataclasses.replace(verdict, plan=ran)

    # Under torchrun only rank 0 has the results of all ranks.
    return ask_rank_0(compare) if ranks is None and is_under_torchrun() else compare()


def judge(case: Case, results: Sequence[TrainingResult], *, tolerance: float = TOLERANCE) -> Verdict:
    """Compare the trainings of all ranks in float64 with each other and with the reference."""
    plan = Plan.parse(results[0].plan)
    reference, against = _reference(case, plan, results[0], torch.float64)
    _refuse_standstill(case, reference, torch.float64)
    tensors = tensor_gaps(results[0], reference) | rank_gaps(results, against)
    numbers = number_gaps(results[0], reference, against)
    scales = kind_scales(reference, against)
    return Verdict(plan, case.steps, tensors, numbers, tolerance, against, scales)


def judge_low_precision(case: Case, results: Sequence[TrainingResult]) -> LowPrecisionVerdict:
    """Compare the trainings of all ranks with each other and with one device in the same precision."""
    plan = Plan.parse(results[0].plan)
    dtype = DTYPES[plan.precision]
    rounded, against = _reference(case, plan, results[0], dtype)
    exact, _ = _reference(case, plan, results[0], torch.float32, rounded.overflows)
    exact.masters = {name: exact.weights[name] for name in rounded.masters}
    _refuse_standstill(case, rounded, dtype)
    model = case.build(dtype=dtype)
    compare = functools.partial(
        compare_low_precision,
        results,
        rounded,
        exact,
        model.state_dict(),
        case.steps,
        against,
        optimizer_rounding=_optimizer_rounding(case, model),
    )
    verdict, disturbed = compare(), []
    for draw in range(_DRAWS):
        if verdict.holds:
            break
        with disturbed_outputs(torch.finfo(dtype).eps, draw):
            disturbed.append(_reference(case, plan, results[0], dtype, rounded.overflows)[0])
        verdict = compare(disturbed=disturbed)
    return verdict


def _optimizer_rounding(case: Case, model: nn.Module) -> float:
    """Return the rounding of the type in which the optimizer computes: torch's Muon takes bf16 for its
    products, whatever the type of the weights, and two gradients that differ in the last bits of fp16 may be
    one of bf16 apart."""
    made = case.make_optimizer([p for p in model.parameters() if p.requires_grad])
    inside: Sequence[torch.optim.Optimizer] = getattr(made, "optimizers", ())  # of a CombinedOptimizer
    optimizers = list(made) if isinstance(made, list | tuple) else [made, *inside]
    return rounding_of("bf16") if any(isinstance(each, torch.optim.Muon) for each in optimizers) else 0.0


def assert_equal(case: Case, plan: Plan | str, *, tolerance: float = TOLERANCE) -> Verdict:
    """`verify` for tests: raises AssertionError with the verdict when the plan differs."""
    verdict = verify(case, plan, tolerance=tolerance)
    assert verdict.equal, str(verdict)
    return verdict


def train_rank(case: Case, plan: Plan, bug: str | Bug | None) -> TrainingResult:
    """One rank's training under the plan. Rank 0 returns the full state, the others its fingerprints."""
    engine, result = train_engine(case, plan, bug)
    engine.close(restore=False)
    return result


def train_engine(case: Case, plan: Plan, bug: str | Bug | None) -> tuple[Engine, TrainingResult]:
    """As `train_rank`, with the engine still open."""
    if bug is not None:  # which the contract is to find by itself
        case = dataclasses.replace(case, options=case.options | {"audit": "off"})
    engine, dtype = make_engine(case, plan), DTYPES[plan.precision]
    if bug is not None:
        inject(bug, engine, silently=True)
    with case.without_casts(dtype):
        metrics = [engine.step(engine.local(batch)) for batch in case.batches(dtype)]
        return engine, result_of(engine, case, metrics)


def make_engine(case: Case, plan: Plan) -> Engine:
    """An engine that trains `case`; on each rank the model starts with other weights."""
    dtype, options = DTYPES[plan.precision], {"check_every": 0} | case.options
    if plan.precision != "fp16":  # a case of fp16 is proven in float64 too
        options.pop("loss_scale", None)
    return parallelize(
        case.build(int(os.environ["RANK"]), dtype),
        plan,
        optimizer=case.make_optimizer,
        loss=case.loss,
        clip=case.clip,
        seed=case.seed,
        sample_batch=case.batches(dtype)[0],
        **options,  # what ranks hold is compared at the end
    )


def result_of(engine: Engine, case: Case, metrics: Sequence[Metrics]) -> TrainingResult:
    """Return the result of a training: on rank 0 the full state, on the others its fingerprints."""
    last = case.batches(DTYPES[engine.plan.precision])[-1]
    result = TrainingResult(
        engine.full_state_dict(),
        engine.full_optimizer_state(),
        losses=[step.loss for step in metrics],
        grad_norms=[step.grad_norm for step in metrics],
        evaluation=engine.evaluate(engine.local(last)).loss,
        log=engine.log(),
        plan=str(engine.plan),
        boundaries=engine.boundaries,
        masters=_masters(engine),
        skipped=[step.skipped for step in metrics],
        loss_scales=[step.loss_scale for step in metrics],
    )
    return summarize(result) if engine.mesh.rank else result


def _masters(engine: Engine) -> dict[str, Tensor]:
    owned = [each for each in engine.owned() if each.slice.part == MASTER]
    full = assemble(owned, engine.mesh.group("all"), engine.mesh.device)
    return {name: master for (name, _), master in full.items()}


def _train(ranks: Ranks | None, case: Case, plan: Plan, bug: str | Bug | None) -> list[TrainingResult]:
    if ranks is not None:
        return ranks.run(train_rank, case, plan, bug)
    preload(*TRAINING_MODULES)
    # Ranks of torchrun keep the process group, and its deadline, for what the script does afterwards.
    start = launch if is_under_torchrun() else functools.partial(launch, deadline=_DEADLINE)
    return start(train_rank, _ranks_to_launch(plan), case, plan, bug)


def _ranks_to_launch(plan: Plan) -> int:
    if not is_under_torchrun():
        return ranks_here(plan)
    running = int(os.environ["WORLD_SIZE"])
    if plan.pipeline != AUTO and plan.ranks != running:
        raise UserError(
            f"verify trains on all ranks of torchrun: plan '{plan}' needs {plan.ranks}, but {running} are "
            f"running. Start torchrun with {plan.ranks} processes in total, or run verify without torchrun."
        )
    return running


def _check(plan: Plan, precision: str, bug: str | Bug | None) -> None:
    if precision not in PRECISIONS:
        raise UserError(f"--precision {precision}: must be {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}")
    if precision != "fp64" and plan.compress not in ("none", "gist"):
        raise UserError(
            f"--precision {precision} with compress={plan.compress}: one device in {precision} does not "
            "round what it saves, so the two are not alike; verify in fp64, where formats keep all bits, or "
            "with compress=gist"
        )
    if isinstance(bug, str):
        check_bug(bug, plan)


def _reference(
    case: Case,
    plan: Plan,
    result: TrainingResult,
    dtype: torch.dtype,
    overflows: Collection[tuple[int, int]] = (),
) -> tuple[TrainingResult, str]:
    """Return the training to compare a plan with, in `dtype`, and its name. `overflows`: what it skips."""
    if plan.sync == "async" and plan.staleness > 0:
        return replay(result.log, case, plan.data, dtype=dtype), LOG
    if not plan.flushes:
        return train_by_formula(case, plan, result.boundaries, dtype, overflows), FORMULA
    reference = train_on_one_device(
        case,
        dtype,
        keeps_masters=plan.masters,
        followed=result.skipped,
        overflows=overflows,
        delay=plan.delay,
    )
    return reference, DELAYED if plan.delay else ONE_DEVICE


def _refuse_standstill(case: Case, reference: TrainingResult, dtype: torch.dtype) -> None:
    """Refuse a training that changes no weights: equality would be meaningless."""
    start = case.build(dtype=dtype).state_dict()
    if all(torch.equal(value, start[name]) for name, value in reference.weights.items()):
        raise UserError(
            f"after {case.steps} steps of the reference no weight has moved, so equality proves nothing; "
            "train for more steps, or with a learning rate above 0"
        )
