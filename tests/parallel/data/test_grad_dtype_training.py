"""Gradients of bf16 weights, summed over microbatches and ranks: every way to share them is without loss."""

import math
from collections.abc import Callable
from functools import partial
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


Measured = dict[str, tuple[float, set[torch.dtype]]]


def measure(choice: str, *, hooks: bool = True) -> Measured:
    """By plan, the norm of two gradients, each the sum of 1 and of 2⁻⁹ for every other sample, and the types
    that hooks on the weights have seen."""
    measured = {}
    samples = torch.full((MICROBATCHES, 1), SMALL)
    samples[0] = 1.0
    for plan, replicas in PLANS.items():
        text = f"{plan} microbatches={MICROBATCHES // replicas} precision=bf16 {choice}"
        model = nn.Sequential(Scale(), Scale())
        hooked: set[torch.dtype] = set()
        for weight in model.parameters() if hooks else ():
            weight.register_hook(lambda gradient, hooked=hooked: hooked.add(gradient.dtype))
        options = {"smallest_unit": 0, "audit": "off"}  # such a total is no sum over samples
        with echelon.parallelize(model, text, optimizer=sgd, loss=total, **options) as engine:
            norm = float(engine.step(engine.local((samples, samples))).grad_norm)
        measured[plan] = norm, hooked
    return measured


def test_every_way_to_share_gradients_sums_without_loss(warm_ranks: Warm) -> None:
    exact = math.sqrt(2) * (1 + (MICROBATCHES - 1) * SMALL) / MICROBATCHES
    for measured in warm_ranks(2).run(measure, ""):
        norms = {plan: norm for plan, (norm, _) in measured.items()}
        assert norms == pytest.approx(dict.fromkeys(PLANS, exact), rel=1e-7)
        assert_hooked(measured, torch.float32)
    for measured in warm_ranks(2).run(measure, "gradients=same"):
        assert all(norm < exact * 0.99 for norm, _ in measured.values()), "in bf16 bits are lost"
        assert_hooked(measured, torch.bfloat16)


def test_so_do_products_that_nobody_has_converted(warm_ranks: Warm) -> None:
    """Without hooks autograd adds bf16 products to float32 sums."""
    exact = math.sqrt(2) * (1 + (MICROBATCHES - 1) * SMALL) / MICROBATCHES
    for measured in warm_ranks(2).run(partial(measure, hooks=False), ""):
        norms = {plan: norm for plan, (norm, _) in measured.items()}
        assert norms == pytest.approx(dict.fromkeys(PLANS, exact), rel=1e-7)


# Loops of one's own: the number of backward passes is not known before them.


def share(engine: Any, x: Tensor) -> Tensor:
    return engine(x).sum() / MICROBATCHES


def by_batches(engine: Any, samples: Tensor) -> None:
    for x in samples:
        engine.forward_backward((x[None], x[None]))


def by_passes(engine: Any, samples: Tensor) -> None:
    for x in samples:
        engine.backward(share(engine, x[None]))


def by_one_backward(engine: Any, samples: Tensor) -> None:
    engine.backward(sum(share(engine, x[None]) for x in samples))


def by_some_in_one(engine: Any, samples: Tensor) -> None:
    """The first backward pass uses each weight once, and the second one often."""
    engine.backward(share(engine, samples[-1:]))
    by_one_backward(engine, samples[:-1])


@pytest.mark.parametrize("add", [by_batches, by_passes, by_one_backward, by_some_in_one])
def test_loops_of_one_s_own_sum_without_loss(add: Callable[[Any, Tensor], None]) -> None:
    samples = torch.full((MICROBATCHES, 1), SMALL)
    samples[0] = 1.0
    model = nn.Sequential(Scale(), Scale())
    scale = MICROBATCHES if add is by_batches else 1
    exact = math.sqrt(2) * (1 + (MICROBATCHES - 1) * SMALL) * scale / MICROBATCHES
    with echelon.parallelize(model, "precision=bf16", optimizer=sgd, loss=total, audit="off") as engine:
        for _ in range(3):
            add(engine, samples)
            assert float(engine.update().grad_norm) == pytest.approx(exact, rel=1e-7)


def assert_hooked(measured: Measured, dtype: torch.dtype) -> None:
    """Hooks on weights see gradients of the type that they are summed in."""
    assert {plan: hooked for plan, (_, hooked) in measured.items()} == {plan: {dtype} for plan in PLANS}
