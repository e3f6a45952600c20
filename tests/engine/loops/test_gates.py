"""Several batches before an update, of models with gates of experts: each batch is a global batch of its own
for auxiliary losses and draws, and gates balance themselves by all of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import echelon
from echelon.launching import Ranks
from echelon.models import cross_entropy
from echelon.nn.experts import Gate, NoisyTopKGate, SigmoidGate, SoftmaxGate, after_step, auxiliary_loss
from tests.cases import sgd
from tests.nn.experts.models import EXPERTS, WIDTH, make_model
from tests.parallel.expert.models import TENSOR_TABLE, tokens

Warm = Callable[[int], Ranks]
GATES: dict[str, Callable[[], Gate]] = {
    "loss": lambda: SoftmaxGate(WIDTH, EXPERTS, 2, balance=0.5, z_loss=0.1),
    "balances itself": lambda: SigmoidGate(WIDTH, EXPERTS, 2, bias_rate=0.01),
    "noise": lambda: NoisyTopKGate(WIDTH, EXPERTS, 2),
}
BATCHES = 2  # of each update


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    """Of different sizes, and with other counts."""
    return [tokens(BATCHES * step + number, samples=8 - 2 * number) for number in range(BATCHES)]


def plain(gate: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = make_model(GATES[gate]).double()
    optimizer, losses = sgd(model.parameters()), torch.zeros(3).double()
    for step in range(3):
        optimizer.zero_grad()
        for inputs, targets in batches(step):
            total, count = cross_entropy(model(inputs), targets)
            loss = total / count + auxiliary_loss(model)
            loss.backward()
            losses[step] += loss.detach()
        optimizer.step()
        after_step(model)
    return model.state_dict() | {"losses": losses}


def in_parts(gate: str, plan: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = make_model(GATES[gate]).double()
    table = TENSOR_TABLE if "tensor=" in plan else None
    with echelon.parallelize(
        model, f"{plan} precision=fp64", optimizer=sgd, loss=cross_entropy, tensor_table=table
    ) as engine:
        losses = torch.zeros(3).double()
        for step in range(3):
            for batch in batches(step):
                engine.forward_backward(engine.local(batch))
            losses[step] = engine.update().loss
        loads = engine.expert_load()
        routed = sum(batch[0].numel() for batch in batches(2))
        assert sum(next(iter(loads.values())).tokens) == 2 * routed
        return engine.full_state_dict() | {"losses": losses}


def check(gate: str, plan: str) -> None:
    torch.testing.assert_close(in_parts(gate, plan), plain(gate), rtol=0, atol=1e-9)


PLANS = ["data=2 microbatches=2", "data=2 expert=2 zero=3", "pipeline=2 microbatches=2"]
MORE = ["data=2 zero=1", "tensor=2", "context=2", "pipeline=2 schedule=gpipe microbatches=2"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("gate", ["loss", "balances itself"])
@pytest.mark.parametrize("plan", [*PLANS, *(pytest.param(plan, marks=pytest.mark.slow) for plan in MORE)])
def test_each_batch_is_one_of_the_balance(warm_ranks: Warm, gate: str, plan: str) -> None:
    warm_ranks(2).run(check, gate, plan)


def test_each_batch_draws_its_own_noise(warm_ranks: Warm) -> None:
    (alone,) = warm_ranks(1).run(in_parts, "noise", "data=1")
    for weights in warm_ranks(2).run(in_parts, "noise", "data=2 expert=2"):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-9)
