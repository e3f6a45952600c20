"""Gradients of bf16 weights, summed over microbatches and ranks: every way to share them is without loss."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.launching import Ranks

Warm = Callable[[int], Ranks]

MICROBATCHES = 16  # of all replicas
SMALL = 2.0**-9  # of which bf16 can add none to 1

# Plans of two ranks, without `microbatches`.
PLANS = {
    "data=2": 2,
    "data=2 zero=1": 2,
    "data=2 zero=2": 2,
    "data=2 zero=3": 2,
    "data=2 sync=parameter-server": 2,
    "data=2 sync=async staleness=0": 2,
    "pipeline=2": 1,
    "pipeline=2 schedule=zero-bubble": 1,
}


class Scale(nn.Module):
    """Multiplies by one number, which is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def total(output: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return output.sum(), torch.ones(())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def norms(choice: str) -> dict[str, float]:
    """By plan, the norm of two gradients, each the sum of 1 and of 2⁻⁹ for every other sample."""
    measured = {}
    samples = torch.full((MICROBATCHES, 1), SMALL)
    samples[0] = 1.0
    for plan, replicas in PLANS.items():
        text = f"{plan} microbatches={MICROBATCHES // replicas} precision=bf16 {choice}"
        model = nn.Sequential(Scale(), Scale())
        with echelon.parallelize(model, text, optimizer=sgd, loss=total, smallest_unit=0) as engine:
            measured[plan] = float(engine.step(engine.local((samples, samples))).grad_norm)
    return measured


def test_every_way_to_share_gradients_sums_without_loss(warm_ranks: Warm) -> None:
    exact = math.sqrt(2) * (1 + (MICROBATCHES - 1) * SMALL) / MICROBATCHES
    for measured in warm_ranks(2).run(norms, ""):
        assert measured == pytest.approx(dict.fromkeys(PLANS, exact), rel=1e-7)
    for measured in warm_ranks(2).run(norms, "gradients=same"):
        assert all(value < exact * 0.99 for value in measured.values()), "in bf16 bits are lost"
