"""Which passes of a gate count, in an engine as in a plain loop, and what is refused where they would not."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.engine import Engine, parallelize
from echelon.errors import UserError
from echelon.nn.experts import (
    Experts,
    Gate,
    MixtureOfExperts,
    SigmoidGate,
    SoftmaxGate,
    after_step,
    auxiliary_loss,
)
from echelon.nn.experts.softmax_gates import SoftmaxRouter

WIDTH, EXPERTS = 8, 4
PLANS = ["data=1", "microbatches=2"]

balanced = partial(SoftmaxGate, WIDTH, EXPERTS, 2, balance=1.0)


class Net(nn.Module):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.moe = MixtureOfExperts(gate, Experts(EXPERTS, WIDTH, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        output: Tensor = self.last(hidden + self.mix(hidden))
        return output

    def mix(self, x: Tensor) -> Tensor:
        output: Tensor = self.moe(x)
        return output


def mean_square(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return draw(6, 5, 4), draw(6, 5, 3)


def make(gate: Callable[[], Gate], kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return kind(gate()).double()


def engine_of(model: Net, plan: str) -> Engine:
    return parallelize(
        model,
        f"{plan} precision=fp64",
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=mean_square,
        audit="off",
    )


def train_plainly(model: Net, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        (mean_square(model(inputs), targets) + auxiliary_loss(model)).backward()
        optimizer.step()
        after_step(model)


def train(model: Net, plan: str, steps: int = 2) -> None:
    with engine_of(model, plan) as engine:
        for step in range(steps):
            assert engine.step(batch(step)).loss > 0


def check_equal(plan: str, gate: Callable[[], Gate], kind: type[Net] = Net, **modes: Any) -> None:
    models = [make(gate, kind) for _ in range(2)]
    for model in models:
        model.moe.gate.train(modes.get("training", True))
    train_plainly(models[0])
    train(models[1], plan)
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.slow_cases(
    "False-gate1-data=1", "False-gate1-microbatches=2", "True-gate0-data=1", "True-gate0-microbatches=2"
)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("gate", [balanced, partial(SigmoidGate, WIDTH, EXPERTS, 2, bias_rate=0.1)])
@pytest.mark.parametrize("training", [True, False])
def test_gates_in_evaluation_mode_are_not_balanced(
    plan: str, gate: Callable[[], Gate], training: bool
) -> None:
    check_equal(plan, gate, training=training)


class LossAlone(Gate):
    """Says nothing of having a loss. Inside it, a gate that has one."""

    rows: ClassVar[tuple[str, ...]] = SoftmaxGate.rows

    def __init__(self) -> None:
        super().__init__(EXPERTS, 2)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    route = SoftmaxRouter.route
    _jittered, _choose = SoftmaxRouter._jittered, SoftmaxRouter._choose
    normalize, z_loss, jitter = True, 1.0, 0.0

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        tokens, _, _, probability, _ = statistics
        return (tokens * probability).sum() / tokens.sum() ** 2


def test_a_gate_with_a_loss_of_its_own_has_a_loss() -> None:
    assert LossAlone().has_loss
    check_equal("data=1", LossAlone)


@pytest.mark.parametrize("plan", ["schedule=pipedream microbatches=2", "sync=async"])
def test_nothing_is_kept_where_updates_have_no_global_batch(plan: str) -> None:
    model = make(partial(SoftmaxGate, WIDTH, EXPERTS, 2))
    train(model, plan)
    assert not model.moe.gate.pending
    assert model.moe.gate.seen is None


def test_a_plain_loop_keeps_what_is_asked_for() -> None:
    free, biased = SoftmaxGate(WIDTH, EXPERTS, 2), SigmoidGate(WIDTH, EXPERTS, 2)
    x = torch.randn(2, 3, WIDTH)
    for gate in (free, biased):
        for _ in range(3):
            gate(x)
        assert not gate.pending
    assert free.seen is None
    assert biased.seen is not None
    assert biased.seen.shape == (3, EXPERTS)
    assert not biased.seen.requires_grad
    assert biased.seen[0].sum() == 3 * 2 * 3 * 2
    after_step(biased)
    assert biased.seen is None
    assert biased.e_score_correction_bias.any()


def test_losses_that_are_switched_on_later_are_refused() -> None:
    model = make(partial(SoftmaxGate, WIDTH, EXPERTS, 2))
    with engine_of(model, "data=1") as engine:
        engine.step(batch())
        model.moe.gate.balance = 1.0  # type: ignore[assignment]
        with pytest.raises(UserError, match=r"moe\.gate: its auxiliary loss was switched on after"):
            engine.step(batch())
        model.moe.gate.balance = 0.0  # type: ignore[assignment]
        assert engine.step(batch()).loss > 0


class LooksTwice(Net):
    def mix(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target: Tensor = self.moe(x.flip(0) * 3)
        return super().mix(x) + target


@pytest.mark.parametrize("gate", [balanced, partial(SigmoidGate, WIDTH, EXPERTS, 2, bias_rate=0.1)])
def test_passes_without_a_trace_do_not_count(gate: Callable[[], Gate]) -> None:
    check_equal("data=1", gate, LooksTwice)


# Gradients that would be lost.


class Detached(Net):
    def mix(self, x: Tensor) -> Tensor:
        return super().mix(x).detach()


class LooksTwiceWithATrace(Net):
    def mix(self, x: Tensor) -> Tensor:
        return super().mix(x) + super().mix(x.flip(0) * 3).detach()


class Counting(Net):
    """Another function in each call; nobody can put back what an iterator counts."""

    calls = itertools.count(1)

    def mix(self, x: Tensor) -> Tensor:
        return super().mix(x * next(Counting.calls))


class OtherWithoutAutograd(Net):
    def mix(self, x: Tensor) -> Tensor:
        return super().mix(x if torch.is_grad_enabled() else x * 5)


@pytest.mark.parametrize(
    ("plan", "kind", "words"),
    [
        ("data=1", Detached, "does not depend on the weights"),
        ("microbatches=2", Detached, "does not depend on the weights"),
        ("data=1", LooksTwiceWithATrace, "does not use what the gate returned in some of its calls"),
        ("microbatches=2", Counting, "the passes whose statistics are counted"),
        ("microbatches=2", OtherWithoutAutograd, "computes something else without autograd"),
        ("microbatches=2", LooksTwice, "leave out passes under no_grad"),
    ],
)
def test_gradients_that_would_be_lost_are_refused(plan: str, kind: type[Net], words: str) -> None:
    model = make(balanced, kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with engine_of(model, plan) as engine, pytest.raises(UserError, match=words) as error:
        engine.step(batch())
    assert "moe.gate (SoftmaxGate)" in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Checkpointed(Net):
    def mix(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.moe, x, use_reentrant=isinstance(self, Reentrant))
        return output


class Reentrant(Checkpointed):
    pass


biased = partial(SigmoidGate, WIDTH, EXPERTS, 2, bias_rate=0.1)


@pytest.mark.slow_cases("gate0-data=1", "gate1-microbatches=2")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("gate", [balanced, biased])
def test_gates_that_also_run_in_the_backward_pass_count_once(plan: str, gate: Callable[[], Gate]) -> None:
    check_equal(plan, gate, Checkpointed)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of a pass without autograd
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("gate", [balanced, biased])
def test_gates_that_run_in_the_backward_pass_alone_are_refused(plan: str, gate: Callable[[], Gate]) -> None:
    with (
        engine_of(make(gate, Reentrant), plan) as engine,
        pytest.raises(UserError, match="runs this gate again in the backward pass"),
    ):
        engine.step(batch())


def test_frozen_gates_have_no_gradient_to_lose() -> None:
    model = make(balanced, Detached)
    model.first.requires_grad_(False)
    model.moe.requires_grad_(False)
    train(model, "microbatches=2")


class LossOfWeights(SoftmaxRouter):
    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        return super().auxiliary_loss(statistics) + self.weight.square().sum()


class ConstantLoss(SoftmaxRouter):
    has_loss = True

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        return statistics.new_ones(())


@pytest.mark.parametrize("plan", PLANS)
def test_losses_of_other_tensors_are_refused(plan: str) -> None:
    model = make(partial(LossOfWeights, WIDTH, EXPERTS, 2, balance=1.0))
    with engine_of(model, plan) as engine, pytest.raises(UserError, match="depends on other tensors"):
        engine.step(batch())


def test_a_constant_loss_has_no_gradient() -> None:
    check_equal("data=1", partial(ConstantLoss, WIDTH, EXPERTS, 2))
