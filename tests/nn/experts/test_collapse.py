"""A task made to collapse: all inputs have one strong direction in common, and experts learn fast.

Whichever expert is best at first has most of the gradients, and soon all of the tokens. The balancing losses,
or the bias, keep every expert at work.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.nn.experts import (
    Experts,
    Gate,
    MixtureOfExperts,
    NoisyTopKGate,
    SigmoidGate,
    SoftmaxGate,
    after_step,
    auxiliary_loss,
)

WIDTH, TOKENS, STEPS, LAST = 16, 128, 100, 20


def data(common: float, spread: float) -> tuple[Tensor, Tensor]:
    """Tokens of 16 kinds: `common` is what they share, `spread` how much kinds differ."""
    generator = torch.Generator().manual_seed(5)
    direction = F.normalize(torch.randn(WIDTH, generator=generator), dim=0)
    kinds = spread * torch.randn(16, WIDTH, generator=generator)
    noise = 0.2 * torch.randn(TOKENS, WIDTH, generator=generator)
    x = common * direction + kinds.repeat(TOKENS // 16, 1) + noise
    targets = torch.tanh(x @ torch.randn(WIDTH, WIDTH, generator=generator) / 4)
    return x[None], targets[None]


def shares(gate: Gate, x: Tensor, targets: Tensor) -> Tensor:
    """The part of the tokens that each expert has, in the last steps of a training."""
    layer = MixtureOfExperts(gate, Experts(gate.num_experts, WIDTH, 16, "gelu"))
    for parameter in layer.experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    history: list[Tensor] = []
    gate.register_forward_hook(
        lambda _, __, routing: history.append(routing.indices.flatten().bincount(minlength=gate.num_experts))
    )
    for _ in range(STEPS):
        loss = F.mse_loss(layer(x), targets)
        optimizer.zero_grad()
        (loss + auxiliary_loss(layer)).backward()
        optimizer.step()
        after_step(layer)
    return torch.stack(history[-LAST:]) / TOKENS


CASES: dict[str, tuple[float, float, Callable[[float], Gate]]] = {
    "balance loss": (6, 0.6, lambda weight: SoftmaxGate(WIDTH, 4, 1, normalize=False, balance=weight)),
    "importance and load": (
        5,
        0.7,
        lambda weight: NoisyTopKGate(WIDTH, 8, 2, importance=weight, load=weight),
    ),
    "bias": (5, 0.7, lambda weight: SigmoidGate(WIDTH, 4, 1, normalize=False, bias_rate=weight / 30)),
}


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("importance and load")
@pytest.mark.parametrize("name", CASES)
def test_one_expert_takes_almost_all_unless_balanced(name: str) -> None:
    common, spread, make_gate = CASES[name]
    found = {}
    for weight in (0.0, 0.3):
        torch.manual_seed(0)
        gate = make_gate(weight)
        found[weight] = shares(gate, *data(common, spread))
    fair_share = gate.top_k / gate.num_experts
    print(f"largest share {found[0.0].max():.2f} without, {found[0.3].max():.2f} with; fair {fair_share:.2f}")
    assert found[0.0].mean(0).max() > 0.8
    assert found[0.3].max() <= 2 * fair_share
    assert found[0.3].min() > 0
