"""Gradients of weights and of losses, against differences."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from echelon.nn.dropout.modules import key_dropout
from echelon.nn.dropout.training_position import scope
from echelon.nn.experts import (
    ExpertChoiceGate,
    Gate,
    GShardGate,
    HierarchicalGate,
    NoisyTopKGate,
    SigmoidGate,
    SoftmaxGate,
    SwitchGate,
)
from echelon.nn.wrapping import Wrapping

WIDTH, EXPERTS = 3, 4
GATES: dict[str, Callable[[], Gate]] = {
    "softmax": lambda: SoftmaxGate(WIDTH, EXPERTS, 2, balance=0.3, z_loss=0.2),
    "unnormalized": lambda: SoftmaxGate(WIDTH, EXPERTS, 2, normalize=False),
    "noisy": lambda: NoisyTopKGate(WIDTH, EXPERTS, 2, z_loss=0.2),
    "noisy, all": lambda: NoisyTopKGate(WIDTH, EXPERTS, EXPERTS),
    "switch": lambda: SwitchGate(WIDTH, EXPERTS, balance=0.3, jitter=0.1, capacity=0.8),
    "gshard": lambda: GShardGate(WIDTH, EXPERTS, balance=0.3, z_loss=0.2, capacity=0.8),
    "sigmoid": lambda: SigmoidGate(WIDTH, EXPERTS, 2, groups=2, top_groups=1, scale=2.5),
    "hierarchical": lambda: HierarchicalGate(WIDTH, 2, 2, top_groups=1, top_experts=1),
    "hierarchical, two": lambda: HierarchicalGate(WIDTH, 3, 2, top_groups=2, top_experts=1),
    "expert choice": lambda: ExpertChoiceGate(WIDTH, EXPERTS, z_loss=0.2),
}


@pytest.mark.quick_cases(4)
@pytest.mark.slow_cases("hierarchical, two", "noisy, all")
@pytest.mark.parametrize("name", GATES)
def test_gradients_of_weights_and_losses(name: str) -> None:
    torch.manual_seed(3)
    gate = GATES[name]().double()
    for parameter in gate.parameters():
        nn.init.normal_(parameter)
    key_dropout(gate, Wrapping())
    names = [name for name, _ in gate.named_parameters()]

    def compute(x: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        with scope(seed=0, step=0, first_sample=0):
            routing = functional_call(gate, dict(zip(names, values, strict=True)), (x,))
        statistics = sum(gate.pending, torch.zeros(len(gate.rows), gate.num_experts, dtype=x.dtype))
        gate.pending.clear()
        # A factor of each slot: weights that sum to 1 would hide their gradients.
        factors = torch.linspace(-1, 2, routing.weights.numel(), dtype=x.dtype).view_as(routing.weights)
        return routing.weights * factors, gate.auxiliary_loss(statistics)

    inputs = torch.randn(2, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    values = [parameter.detach().clone().requires_grad_() for parameter in gate.parameters()]
    assert torch.autograd.gradcheck(compute, (inputs, *values), eps=1e-6, atol=1e-7)
    output, loss = compute(inputs, *values)
    gradients = torch.autograd.grad(output.sum() + loss, values, allow_unused=True)
    assert all(gradient is not None and gradient.any() for gradient in gradients)


def test_deviations_close_to_0_have_finite_gradients() -> None:
    gate = NoisyTopKGate(WIDTH, EXPERTS, 2)
    nn.init.normal_(gate.weight)
    nn.init.constant_(gate.noise_weight, -200.0)
    gate(torch.ones(2, 4, WIDTH))
    gate.auxiliary_loss(gate.pending[0]).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in gate.parameters())
