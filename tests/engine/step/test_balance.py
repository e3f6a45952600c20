"""Auxiliary losses of gates are those of the global batch in every plan, and so is what they balance by."""

import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.collectives import RecordingGroup
from echelon.engine import Engine, parallelize
from echelon.engine.step.balance import GateList
from echelon.errors import UserError
from echelon.nn.experts import SoftmaxGate, SwitchGate, gates_of
from echelon.plan import Plan
from echelon.verify import assert_equal, verify
from echelon.verify.contract import make_engine
from tests.engine import test_compiling as compiled
from tests.engine.balance_models import (
    CrowdedGate,
    case,
    crowded_model,
    mean_of_samples,
    tokens,
    weighted_loss,
)
from tests.engine.test_deferred import deferring
from tests.nn.experts.models import EXPERTS, SEQUENCE, make_model
from tests.reads import no_reads

Warm = Any

pytestmark = pytest.mark.usefixtures("warm_contract")


def prove(plan: str, **changes: Any) -> None:
    assert_equal(case(**changes), plan)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 zero=1",
        "data=2 zero=3 microbatches=2 recompute=full",
        "pipeline=2 schedule=gpipe microbatches=2",
        "pipeline=2 microbatches=3",
        "tensor=2 sequence=true microbatches=2",
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in [
                "data=1",
                "microbatches=4",
                "data=2",
                "data=4",
                "data=2 zero=2 microbatches=2",
                "data=4 shard=2 zero=3",
                "data=2 sync=parameter-server",
                "data=2 recompute=full",
                "data=2 recompute=selective microbatches=2",
                "data=2 offload=activations microbatches=2",
                "data=2 offload=optimizer delay=1",
                "data=2 zero=3 offload=parameters,optimizer",
                "compress=gist microbatches=2",
                "tensor=2",
                "tensor=2 sequence=true",
                "data=2 tensor=2 zero=1",
                "context=2",
                "context=2 microbatches=2",
                "context=2 tensor=2 sequence=true",
                "pipeline=2",
                "pipeline=2 schedule=naive microbatches=2",
                "pipeline=2 schedule=interleaved chunks=2 microbatches=4",
                "pipeline=2 schedule=zero-bubble microbatches=4",
                "pipeline=2-1 microbatches=4",
                "data=2 pipeline=2 microbatches=4",
                "data=2 pipeline=2 schedule=gpipe microbatches=4 recompute=full",
                "pipeline=2 tensor=2 sequence=true microbatches=2",
                "data=2 expert=2 microbatches=2",
                "data=2 expert=2 pipeline=2 microbatches=2",
                "data=4 expert=2 zero=3 recompute=full microbatches=2",
            ]
        ),
    ],
)
def test_a_loss_that_is_not_linear_is_that_of_the_global_batch(plan: str) -> None:
    """Replicas hold 4 and 3 samples, and some microbatches none."""
    prove(plan)


@pytest.mark.parametrize("plan", ["data=2", pytest.param("microbatches=3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", [mean_of_samples, weighted_loss])
def test_what_the_loss_counts_does_not_change_the_auxiliary_one(plan: str, loss: Any) -> None:
    prove(plan, loss=loss)


@pytest.mark.parametrize(
    "plan",
    [
        "data=2 update=backward",
        pytest.param("update=last-backward microbatches=2", marks=pytest.mark.slow),
        pytest.param("data=2 zero=3 update=last-backward microbatches=2", marks=pytest.mark.slow),
    ],
)
def test_units_that_are_updated_in_the_backward_pass(plan: str) -> None:
    prove(plan, clip=None)


@pytest.mark.parametrize(
    "plan", ["data=2", pytest.param("pipeline=2 microbatches=2", marks=pytest.mark.slow)]
)
def test_gates_without_a_loss_balance_themselves(plan: str) -> None:
    prove(plan, model=partial(crowded_model, has_loss=False))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2", "pipeline=2 microbatches=2", "tensor=2"])
def test_the_loss_of_softmax_gates(plan: str) -> None:
    prove(plan, model=make_model)


@pytest.mark.parametrize("plan", ["pipeline=2 schedule=gpipe microbatches=3"])
def test_microbatches_without_samples_do_not_count(plan: str) -> None:
    prove(plan, samples=2)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("plan", ["data=2", "microbatches=2"])
def test_a_loss_scale_is_that_of_auxiliary_losses_too(plan: str, precision: Any) -> None:
    checked = case(steps=2, samples=8, options={"loss_scale": 256.0})
    verdict = verify(checked, plan, precision=precision)
    assert verdict.holds, str(verdict)


@pytest.mark.slow
def test_gates_of_compiled_layers(warm_ranks: Warm) -> None:
    compiled.assert_equal(warm_ranks(2), case(steps=2, samples=8), "data=2 microbatches=2")


# Bugs.


def forget_other_ranks(engine: Engine) -> None:
    assert engine._balance is not None
    engine._balance._group = RecordingGroup("all")


def forget_other_microbatches(engine: Engine) -> None:
    """The sums are those at the first backward pass."""
    assert engine._balance is not None
    engine._balance.needs_pass = False


def record_twice(engine: Engine) -> None:
    """The statistics pass leaves its trace in what gates balance by."""
    balance = engine._balance
    assert balance is not None
    add = balance.add

    def add_twice(gate: Any, statistics: Tensor) -> None:
        add(gate, statistics)
        if balance._is_exchanged:
            balance._here[gate].of(balance._sums).add_(statistics * torch.arange(EXPERTS))

    balance.add = add_twice  # type: ignore[method-assign]


def forget_the_normaliser(engine: Engine) -> None:
    balance = engine._balance
    assert balance is not None
    gradient = balance.gradient
    balance.gradient = lambda gate, seen: gradient(gate, seen) * 0.5  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("plan", "bug"),
    [
        ("data=2", forget_other_ranks),
        pytest.param("data=2 microbatches=2", record_twice, marks=pytest.mark.slow),
        pytest.param("data=2", forget_the_normaliser, marks=pytest.mark.slow),
    ],
)
def test_the_contract_finds_bugs(plan: str, bug: Any) -> None:
    assert not verify(case(), plan, inject_bug=bug).equal


@pytest.mark.slow
def test_microbatches_that_are_not_counted_are_refused() -> None:
    """Before anything is wrong: their backward passes go through gates that recorded nothing."""
    with pytest.raises(UserError, match="are not those that the backward pass goes through"):
        verify(case(), "data=2 microbatches=2", inject_bug=forget_other_microbatches)


# Updates that are not made.


@pytest.mark.parametrize("skipped", [True, torch.tensor(True)])
def test_skipped_updates_leave_gates_as_they_are(skipped: bool | Tensor) -> None:
    engine = make_alone()
    gate = gates_of(engine.module)[0]
    bias = gate.get_buffer("bias").clone()
    assert engine._balance is not None
    engine._balance.after_update(skipped)
    assert torch.equal(gate.get_buffer("bias"), bias)
    engine._balance.after_update(torch.tensor(False))
    assert not torch.equal(gate.get_buffer("bias"), bias)
    engine.close()


class ScaledByGate(nn.Module):
    """A mixture whose experts do nothing: on a CPU, experts read how many tokens each has."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = CrowdedGate()

    def forward(self, x: Tensor) -> Tensor:
        weights: Tensor = self.gate(x).weights
        return x * weights.sum(-1).view(*x.shape[:-1], 1)


def model_without_experts() -> nn.Module:
    model = crowded_model()
    for block in model.blocks:
        block.mlp = ScaledByGate()
    return model


def make_alone(plan: str = "data=1") -> Engine:
    """An engine of this process, after one step."""
    alone = case(model_without_experts)
    options: Any = {"optimizer": alone.make_optimizer, "loss": alone.loss, "audit": "first"}
    engine = parallelize(alone.build(), f"{plan} precision=fp64", **options)
    assert engine.step(tokens(0)).loss > 0  # which the second step after it would do
    return engine


@pytest.mark.parametrize("plan", ["data=1", "microbatches=2"])
def test_no_step_reads_from_a_device(plan: str) -> None:
    with deferring():
        late = make_alone(plan)
    direct = make_alone(plan)
    assert late.step(tokens(1)).loss > 0
    with no_reads():
        metrics = late.step(tokens(2))
    expected = [direct.step(tokens(step)) for step in (1, 2)][-1]
    assert metrics.auxiliary_loss == pytest.approx(expected.auxiliary_loss, rel=1e-12)
    assert metrics.loss == pytest.approx(expected.loss, rel=1e-12)
    weights = direct.full_state_dict()
    for name, value in late.full_state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-12)


def test_layers_that_run_again_are_recorded_once() -> None:
    engine = make_alone("recompute=full")
    assert all(sum(each.tokens) == 7 * SEQUENCE * 2 for each in engine.expert_load().values())
    for gate in gates_of(engine.module):
        assert not gate.pending
        assert not gate.ran_in_backward, "the second run knows who records"


def test_a_broken_gate_changes_nothing_where_nobody_reads() -> None:
    with deferring():
        engine = make_alone()
    before = engine.full_state_dict()
    gates_of(engine.module)[0].is_broken = True  # type: ignore[assignment]
    metrics = engine.step(tokens(1))
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, before[name]), name
    with pytest.raises(UserError, match=r"blocks\.0\.mlp\.gate: the statistics"):
        _ = metrics.loss


# What a step tells.


def told(plan: str) -> list[Any]:
    engine = make_engine(case(), Plan.parse(plan))
    metrics = engine.step(engine.local(tokens(0)))
    moved = [move.subject for move in engine.ledger.moves].count("gate statistics")
    return [metrics.loss, metrics.auxiliary_loss, engine.expert_load(), moved]


@pytest.mark.parametrize("plan", ["pipeline=2 microbatches=2"])
def test_every_rank_knows_the_load_of_all_experts(warm_ranks: Warm, plan: str) -> None:
    one, two = warm_ranks(2).run(told, plan)
    assert one == two
    loss, auxiliary, load, moved = one
    assert moved == 1
    assert 0 < auxiliary < loss
    assert load.keys() == {"blocks.0.mlp.gate", "blocks.1.mlp.gate"}
    for each in load.values():
        assert sum(each.tokens) == 7 * SEQUENCE * 2
        assert sum(each.dropped) == 0
        assert 0 < each.entropy < math.log(EXPERTS)


def test_a_model_without_gates_has_no_auxiliary_loss() -> None:
    assert GateList(torch.nn.Linear(2, 2)).places == []


# Refusals.


def step_with_a_broken_gate(plan: str) -> list[Any]:
    engine = make_engine(case(clip=None), Plan.parse(plan))
    batch = engine.local(tokens(0))
    engine.step(batch)
    before = engine.full_state_dict()
    for gate in gates_of(engine.module)[-1:]:
        gate.is_broken = True  # type: ignore[assignment]
    try:
        engine.step(batch)
        error = ""
    except UserError as raised:
        error = str(raised)
    for gate in gates_of(engine.module):
        gate.is_broken = False  # type: ignore[assignment]
    after = engine.full_state_dict()
    engine.step(batch)
    return [error, all(torch.equal(value, after[name]) for name, value in before.items())]


@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 microbatches=2",
        pytest.param("data=2 zero=3", marks=pytest.mark.slow),
        pytest.param("data=2 update=backward", marks=pytest.mark.slow),
    ],
)
def test_statistics_that_are_not_finite_are_refused_on_all_ranks(warm_ranks: Warm, plan: str) -> None:
    for error, is_unchanged in warm_ranks(2).run(step_with_a_broken_gate, plan):
        assert error.startswith("blocks.1.mlp.gate: the statistics of this gate are not finite")
        assert is_unchanged


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("data=2 sync=async", "sync=async are each worker's own"),
        ("pipeline=2 schedule=pipedream microbatches=2", "schedule=pipedream are each microbatch's own"),
    ],
)
@pytest.mark.parametrize("has_loss", [True, False])
def test_updates_without_a_global_batch_are_refused(plan: str, words: str, has_loss: bool) -> None:
    with pytest.raises(UserError, match=words) as error:
        GateList.of(crowded_model(has_loss=has_loss), Plan.parse(plan))
    assert "2 errors" in str(error.value)
    assert ("auxiliary loss" in str(error.value)) == has_loss


def test_gates_that_need_no_statistics_train_asynchronously() -> None:
    model = make_model(lambda: SoftmaxGate(16, 4, 2))
    assert len(GateList.of(model, Plan.parse("data=2 sync=async")).places) == 2


class Checkpointed(nn.Module):
    """Runs a layer again in the backward pass, as users do."""

    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return output


def checkpointing_model(*, reentrant: bool) -> nn.Module:
    model = crowded_model()
    for block in model.blocks:
        block.mlp = Checkpointed(block.mlp, reentrant=reentrant)
    return model


def checkpointed(reentrant: bool) -> str:
    checked = case(partial(checkpointing_model, reentrant=reentrant))
    engine = make_engine(checked, Plan.parse("data=2"))
    try:
        engine.step(engine.local(tokens(0)))
    except UserError as error:
        return str(error)
    return ""


def test_a_gate_that_only_runs_in_the_backward_pass_is_refused(warm_ranks: Warm) -> None:
    for error in warm_ranks(2).run(checkpointed, True):
        assert "blocks.0.mlp.inner.gate (CrowdedGate): the model runs this gate again" in error


@pytest.mark.slow
def test_a_gate_that_also_runs_in_the_backward_pass_is_equal_to_one_device() -> None:
    prove("data=2", model=partial(checkpointing_model, reentrant=False))


def padded(plan: str) -> str:
    engine = make_engine(case(), Plan.parse(plan))
    inputs, targets = tokens(0)
    with pytest.raises(UserError) as error:
        engine.step((inputs[:, :7], targets[:, :7]))
    return str(error.value)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("context=2", r"would route the padding too, .* use sequences of a multiple of 4"),
        # Such a gate asks for no view of the sequence, which is refused before.
        pytest.param("tensor=2 sequence=true", "CrowdedGate might attend to padding", marks=pytest.mark.slow),
    ],
)
def test_padding_is_refused_where_gates_would_route_it(warm_ranks: Warm, plan: str, words: str) -> None:
    for error in warm_ranks(2).run(padded, plan):
        assert re.search(words, error)


def test_a_gate_that_no_module_lists_is_refused() -> None:
    """Its auxiliary loss would be missing in silence."""

    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.hidden = [SwitchGate(8, EXPERTS)]

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            return hidden + self.hidden[0](hidden).weights.sum()

    batch = torch.randn(4, 3, 8), torch.randn(4, 3, 8)
    with (
        parallelize(Hides(), "data=1", optimizer=torch.optim.SGD, loss=nn.MSELoss(), audit="off") as engine,
        pytest.raises(UserError, match="auxiliary loss was switched on after"),
    ):
        engine.step(batch)
