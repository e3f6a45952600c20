"""forward_backward, update, forward and weights under every kind of plan: equal to one device.

The plans are those by which `engine.step` is proven. A few of each kind here, the rest by `make fuzz`.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, product

import pytest
import torch
from torch import Tensor

from echelon import UserError
from echelon.engine.engine import Engine
from echelon.models import cross_entropy
from echelon.plan import Plan
from echelon.verify import Case, contract
from echelon.verify.contract import judge, make_engine, result_of
from echelon.verify.reference import TrainingResult
from tests.cases import adamw
from tests.contract_models import CASES as MODELS
from tests.parallel.data.test_matrix import SYNCS
from tests.parallel.expert.models import TENSOR_TABLE, experts_case
from tests.parallel.expert.test_matrix import FAST as EXPERTS
from tests.parallel.expert.test_matrix import SLOW as MORE_EXPERTS
from tests.parallel.pipeline.models import deep, gpt_case, untied_deep
from tests.parallel.pipeline.test_matrix import (
    FLUSHED,
    REPLICAS,
    asynchronous_plans,
    flushed_plans,
    uneven_plans,
)
from tests.parallel.tensor.models import gpt, llama, tokens
from tests.parallel.tensor.test_matrix import everything

pytestmark = pytest.mark.usefixtures("warm_contract")

STEPS = 3
CASES = {
    "language": Case(gpt, partial(tokens, samples=7), cross_entropy, adamw, steps=STEPS),
    "heads": Case(llama, partial(tokens, samples=7), cross_entropy, adamw, steps=STEPS),
    "deep": gpt_case(deep, steps=STEPS),
    "untied": gpt_case(untied_deep, steps=STEPS),
    "experts": experts_case(steps=STEPS),
    "experts in parts": replace(experts_case(steps=STEPS), options={"tensor_table": TENSOR_TABLE}),
    **{
        name: replace(MODELS[name], options={"smallest_unit": 0}, steps=STEPS)
        for name in ("resnet", "lstm", "twice")
    },
}
MEMORY = [
    "recompute=full",
    "recompute=selective",
    "recompute=budget:300000",
    "offload=optimizer",
    "offload=parameters",
    "offload=activations",
    "offload=optimizer,parameters,activations recompute=full",
    "compress=gist",
    "recompute=full checkpoints=split tensor=2",
    "recompute=full contiguous=true",
    "offload=optimizer delay=1",
]
QUICK = [
    ("language", "data=2 zero=2 microbatches=2 recompute=selective"),
    ("language", "data=2 zero=3 offload=optimizer,parameters"),
    ("language", "tensor=2 sequence=true offload=activations"),
    ("language", "context=2 zero=3"),
    ("language", "pipeline=2 schedule=zero-bubble microbatches=3"),
    ("untied", "pipeline=2-1 zero=2 microbatches=3"),
    ("experts", "data=2 expert=2 pipeline=2 microbatches=2"),
    ("language", "data=2 sync=parameter-server"),
    ("language", "offload=optimizer delay=1"),
]


def plans() -> Iterator[tuple[str, str]]:
    """Each with its case."""
    for name, sync, ranks, number in product(("language", "resnet", "lstm", "twice"), SYNCS, (2, 3), (1, 3)):
        if name == "language" or ranks == 2:
            yield name, f"data={ranks} {sync} microbatches={number}"
    for plan in flushed_plans():
        yield "deep", plan
    for replicas, schedule in product((*REPLICAS[1:], "data=2 zero=3"), (*FLUSHED, "interleaved chunks=2")):
        if (replicas[-6:], schedule) != ("zero=3", "zero-bubble"):
            yield "deep", f"pipeline=2 schedule={schedule} microbatches=4 {replicas}"
    for plan in uneven_plans():
        yield "deep", plan
    for zero, plan in product((1, 2), uneven_plans()):
        if zero == 1 or "naive" not in plan:
            yield "untied", f"{plan} zero={zero}"
    for plan in everything():
        yield "language", plan
    for plan in ("context=2", "context=4", "context=2 tensor=2 sequence=true", "context=2 data=2 zero=3"):
        yield "heads", f"{plan} attention=all-to-all"
    for replicas, plan in product(("data=1", "data=2", "data=2 zero=1", "data=2 zero=3"), MEMORY):
        yield "language", f"{plan} {replicas}"
    for plan in chain(EXPERTS, MORE_EXPERTS):
        if "update=" not in plan and "pipedream" not in plan:
            yield "experts in parts" if "tensor=" in plan else "experts", plan


def right(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return (output.argmax(-1) == targets).sum(), targets.numel()


def train_in_parts(case: Case, plan: Plan) -> TrainingResult:
    """Every second step with a loss of the call, of which the engine knows nothing."""
    engine, metrics = make_engine(case, plan), []
    for step, batch in enumerate(case.batches()):
        own = engine.local(batch)
        loss = None if step % 2 else lambda output, targets: case.loss(output, targets)  # type: ignore[misc]
        measure = right if plan.sync != "async" else None
        result = engine.forward_backward(own, loss, collect=first, measure=measure, last=step == 2)
        if not plan.delay:
            outputs = engine.forward(own)  # while gradients wait
            torch.testing.assert_close(result.outputs, outputs, rtol=0, atol=1e-12)
            check_measured(engine, result.measured, outputs, own[1])
        metrics.append(engine.update())
        assert plan.sync == "async" or result.loss == pytest.approx(metrics[-1].loss, rel=1e-12)
    check_weights(engine, case, own)
    trained = result_of(engine, case, metrics)
    engine.close(restore=False)
    return trained


def first(output: Tensor, targets: Tensor) -> Tensor:
    return output


def check_measured(engine: Engine, measured: float | None, outputs: Tensor, targets: Tensor) -> None:
    total, count = right(outputs, targets)
    expected = engine.average(float(total) / count, count)
    assert measured is None or measured == pytest.approx(expected, abs=1e-12)


def check_weights(engine: Engine, case: Case, own: tuple[Tensor, Tensor]) -> None:
    """All of them, one by one; and outputs are those of a plain model with these weights."""
    whole, plain = engine.full_state_dict(), case.build()
    seen = {name: tensor.clone() for name, tensor in engine.weights()}
    assert list(seen) == list(plain.state_dict())
    torch.testing.assert_close(seen, whole, rtol=0, atol=0)
    plain.load_state_dict(whole)
    plain.eval()
    engine.module.eval()
    torch.testing.assert_close(engine.forward(own), plain(own[0]).detach(), rtol=0, atol=1e-9)
    engine.module.train()


def prove(name: str, plan: str) -> None:
    case, parsed = CASES[name], Plan.parse(f"{plan} precision=fp64")
    verdict = judge(case, contract.launch(train_in_parts, parsed.ranks, case, parsed, deadline=300.0))
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize(("name", "plan"), QUICK)
def test_some_plans(name: str, plan: str) -> None:
    prove(name, plan)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), [each for each in plans() if each not in QUICK])
def test_every_plan(name: str, plan: str) -> None:
    prove(name, plan)


def check_refused(case: Case, plan: Plan) -> None:
    engine = make_engine(case, plan)
    own = engine.local(case.batches()[0])
    with pytest.raises(UserError, match=r"weights are updated while passes run.*docs/loops.md"):
        engine.forward_backward(own)
    engine.step(own)
    engine.close()


UPDATING = ["data=2 update=backward", "data=2 update=last-backward microbatches=2"]


@pytest.mark.parametrize("plan", [*UPDATING, "pipeline=2 schedule=pipedream-2bw microbatches=2"])
def test_plans_that_update_within_passes_are_refused(plan: str) -> None:
    case, parsed = replace(CASES["untied"], clip=None), Plan.parse(f"{plan} precision=fp64")
    contract.launch(check_refused, parsed.ranks, case, parsed, deadline=300.0)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [plan for plan in asynchronous_plans() if "microbatches=4" in plan])
def test_pipelines_that_never_drain_are_refused(plan: str) -> None:
    test_plans_that_update_within_passes_are_refused(plan)
