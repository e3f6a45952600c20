"""PipeDream's formulas against recurrences written out by hand, and the pipelines against both."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from echelon.engine import Engine
from echelon.plan import Plan
from echelon.verify import Case, verify
from echelon.verify.replay import train_by_formula
from tests.parallel.pipeline.models import asynchronous_case

RATE, SAMPLES = 0.1, 8


class Scale(nn.Module):
    """A layer of one weight."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def first_weights(depth: int) -> list[float]:
    return [1.0 + 0.25 * stage for stage in range(depth)]


def scales(depth: int) -> nn.Module:
    return nn.Sequential(*(Scale(weight) for weight in first_weights(depth)))


def two_scales() -> nn.Module:
    return scales(2)


def three_scales() -> nn.Module:
    return scales(3)


def four_scales() -> nn.Module:
    return scales(4)


MODELS = {2: two_scales, 3: three_scales, 4: four_scales}


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)


def product_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).mean()


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def scales_case(depth: int, steps: int) -> Case:
    return Case(MODELS[depth], batch, product_loss, plain_sgd, steps=steps, clip=None)


class ByHand(NamedTuple):
    weights: list[float]
    losses: list[float]  # of each step
    evaluations: list[float]  # of the batch of each step after which the pipeline was drained


def by_hand(plan: Plan, steps: int, drains: tuple[int, ...] = (), factor: Any = lambda _: 1.0) -> ByHand:
    """The loss is c·w₀·w₁·…, with c the mean of input times target: its gradients need no autograd.

    Where the pipeline was drained, the newest weights are the first version of what follows.
    """
    history = [first_weights(plan.stages)]
    losses, evaluations = [], []
    updates = 0
    for step in range(steps):
        inputs, targets = batch(step)
        products = (inputs * targets).flatten().tolist()
        parts = [products] if plan.schedule == "pipedream-2bw" else list(cut(products, plan.microbatches))
        loss = 0.0
        for part in parts:
            mean = sum(part) / len(part)
            used = [version(plan, history, stage)[stage] for stage in range(plan.stages)]
            loss += sum(part) * math.prod(used)
            of_step = updates if plan.schedule == "pipedream-2bw" else updates // plan.microbatches
            rate = RATE * factor(of_step)
            gradients = [mean * math.prod(used) / weight for weight in used]
            history.append([w - rate * g for w, g in zip(history[-1], gradients, strict=True)])
            updates += 1
        losses.append(loss / SAMPLES)
        if step in drains:
            evaluations.append(sum(products) / SAMPLES * math.prod(history[-1]))
            history = history[-1:]
    return ByHand(history[-1], losses, evaluations)


def version(plan: Plan, history: list[list[float]], stage: int) -> list[float]:
    late = {
        "pipedream": plan.stages - 1 - stage,
        "pipedream-vertical": plan.stages - 1,
        "pipedream-2bw": 1,
    }
    return history[max(0, len(history) - 1 - late[plan.schedule])]


def cut(products: list[float], number: int) -> Iterator[list[float]]:
    for part in torch.tensor(products, dtype=torch.float64).tensor_split(number):
        yield part.tolist()


PLANS = [
    "pipeline=2 schedule=pipedream microbatches=1",
    "pipeline=3 schedule=pipedream microbatches=4",
    "pipeline=4 schedule=pipedream microbatches=3",
    "pipeline=3 schedule=pipedream-vertical microbatches=2",
    "pipeline=4 schedule=pipedream-vertical microbatches=1",
    "pipeline=2 schedule=pipedream-2bw microbatches=2",
    "pipeline=4 schedule=pipedream-2bw microbatches=5",
]


@pytest.mark.parametrize("text", PLANS)
def test_the_replay_is_the_formula(text: str) -> None:
    plan = Plan.parse(text)
    replayed = train_by_formula(scales_case(plan.stages, 20), plan, list(range(1, plan.stages)))
    hand = by_hand(plan, 20)
    weights = [value.item() for value in replayed.weights.values()]
    assert weights == pytest.approx(hand.weights, abs=1e-12)
    assert replayed.losses == pytest.approx(hand.losses, abs=1e-12)
    assert weights != pytest.approx(first_weights(plan.stages), abs=0.05)


NAMES = ("pipedream", "pipedream-vertical", "pipedream-2bw")


def test_the_formulas_are_three_and_none_is_that_of_one_device() -> None:
    plans = [Plan.parse(f"pipeline=3 schedule={name} microbatches=4") for name in NAMES]
    weights = [tuple(by_hand(plan, 8).weights) for plan in plans]
    assert len(set(weights)) == 3
    inputs = [batch(step) for step in range(8)]
    one_device = first_weights(3)
    for samples, target in inputs:
        mean = (samples * target).mean().item()
        one_device = [w - RATE * mean * math.prod(one_device) / w for w in one_device]
    assert all(final != pytest.approx(one_device, abs=1e-6) for final in weights)


# Pipelines against what was written by hand.


# The verdict can fail.


def overwrite(engine: Engine) -> None:
    """Updates overwrite the weights that microbatches in flight have used."""
    engine._runner._versions._reallocate = lambda: None


def always_newest(engine: Engine) -> None:
    """Every forward uses the newest weights, whatever version its microbatch has used before."""
    versions = engine._runner._versions
    using = versions.using
    versions.using = lambda _: using(versions.newest)


def count_twice(engine: Engine) -> None:
    """The mean is taken over twice as many samples as there were."""
    norm = engine._update.norm
    engine._update.norm = lambda tally, *rest, **named: norm(tally * 2, *rest, **named)


@pytest.mark.slow_cases("always_newest-pipedream-vertical", "overwrite-pipedream")
@pytest.mark.parametrize(
    ("bug", "schedule"),
    [
        (overwrite, "pipedream"),
        (always_newest, "pipedream-vertical"),
        pytest.param(always_newest, "pipedream-2bw", marks=pytest.mark.slow),
        pytest.param(count_twice, "pipedream", marks=pytest.mark.slow),
    ],
)
def test_injected_bugs_are_found(bug: Any, schedule: str) -> None:
    case = asynchronous_case(steps=3)
    assert not verify(case, f"pipeline=2 data=2 schedule={schedule} microbatches=2", inject_bug=bug).equal


def test_the_verdict_names_what_it_compares_with() -> None:
    verdict = verify(scales_case(2, 3), "pipeline=2 schedule=pipedream microbatches=2")
    assert verdict.equal
    assert "equal to its formula, replayed on one process" in str(verdict)
    assert verdict.to_dict()["against"] == "its formula, replayed on one process"
