"""A task made to collapse: all inputs have one strong direction in common, and experts learn fast.

Whichever expert is best at first has most of the gradients, and soon all of the tokens. The balancing losses,
or the bias, keep every expert at work.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.experts import (
    Experts,
    Gate,
    MixtureOfExperts,
    NoisyTopKGate,
    SigmoidGate,
    SoftmaxGate,
    auxiliary_loss,
)

WIDTH, TOKENS, STEPS, LAST = 16, 128, 120, 20


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    common = F.normalize(torch.randn(WIDTH, generator=generator), dim=0)
    x = 4 * common + 0.4 * torch.randn(TOKENS, WIDTH, generator=generator)
    targets = torch.tanh(x @ torch.randn(WIDTH, WIDTH, generator=generator) / 4)
    return x[None], targets[None]


def shares(make_gate: Callable[[], Gate]) -> Tensor:
    """The part of the tokens that each expert has, in the last steps of a training."""
    torch.manual_seed(0)
    gate = make_gate()
    layer = MixtureOfExperts(gate, Experts(gate.num_experts, WIDTH, 16, "gelu"))
    for parameter in layer.experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    x, targets = data()
    history = []
    for _ in range(STEPS):
        loss = F.mse_loss(layer(x), targets)
        statistics = gate.pending[0].detach()
        optimizer.zero_grad()
        (loss + auxiliary_loss(layer)).backward()
        optimizer.step()
        gate.after_step(statistics)
        history.append(statistics[0] / TOKENS)
    return torch.stack(history[-LAST:])


@pytest.mark.parametrize(
    "make_gate",
    [
        lambda weight: SoftmaxGate(WIDTH, 4, 1, normalize=False, balance=weight),
        lambda weight: NoisyTopKGate(WIDTH, 8, 2, importance=weight, load=weight),
        lambda weight: SigmoidGate(WIDTH, 4, 1, normalize=False, bias_rate=0.03 * weight),
    ],
    ids=["balance loss", "importance and load", "bias"],
)
def test_one_expert_takes_almost_all_unless_balanced(make_gate: Callable[[float], Gate]) -> None:
    gate = make_gate(0.1)
    fair_share = gate.top_k / gate.num_experts
    collapsed, balanced = shares(lambda: make_gate(0.0)), shares(lambda: make_gate(0.1))
    print(f"largest share {collapsed.max():.2f} without, {balanced.max():.2f} with; fair {fair_share:.2f}")
    assert collapsed.mean(0).max() > 0.8
    assert balanced.max() <= 2 * fair_share
    assert balanced.min() > 0
