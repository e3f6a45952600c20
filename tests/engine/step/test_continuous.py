"""Pipelines that never drain: evaluations between steps, learning rates, and counts of replicas."""

from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn

import echelon
from echelon.plan import Plan
from echelon.verify import Case, verify
from tests.verify.test_pipedream import PLANS, batch, by_hand, plain_sgd, product_loss, scales


def halving(step: int) -> float:
    return 0.5**step


class Ran(NamedTuple):
    weights: list[float]
    losses: list[float]
    evaluations: list[float]
    rates: list[float]


def run(plan: str, steps: int, drains: tuple[int, ...], scheduled: bool) -> Ran:
    engine = echelon.parallelize(
        scales(Plan.parse(plan).stages),
        f"{plan} precision=fp64",
        optimizer=plain_sgd,
        loss=product_loss,
        schedule=halving if scheduled else None,
    )
    losses, evaluations, rates = [], [], []
    for step in range(steps):
        losses.append(engine.step(batch(step)).loss)
        rates.append(engine.learning_rate)
        if step in drains:
            evaluations.append(engine.evaluate(batch(step)).loss)
    weights = [value.item() for value in engine.full_state_dict().values()]
    return Ran(weights, losses, evaluations, rates)


@pytest.mark.slow_cases(
    "drains0-pipeline=3 schedule=pipedream microbatches=4",
    "drains0-pipeline=4 schedule=pipedream-2bw microbatches=5",
    "drains0-pipeline=4 schedule=pipedream-vertical microbatches=1",
    "drains1-pipeline=3 schedule=pipedream microbatches=4",
    "drains1-pipeline=4 schedule=pipedream-2bw microbatches=5",
)
@pytest.mark.parametrize("text", [PLANS[1], PLANS[4], PLANS[6]])
@pytest.mark.parametrize("drains", [(), (1, 2, 6)])
def test_an_evaluation_drains_and_training_goes_on_from_the_newest_weights(
    warm_ranks: Any, text: str, drains: tuple[int, ...]
) -> None:
    plan = Plan.parse(text)
    hand = by_hand(plan, 9, drains)
    for ran in warm_ranks(plan.ranks).run(run, text, 9, drains, False):
        assert ran.weights == pytest.approx(hand.weights, abs=1e-12)
        assert ran.losses == pytest.approx(hand.losses, abs=1e-12)
        assert ran.evaluations == pytest.approx(hand.evaluations, abs=1e-12)
    if drains:
        assert hand.weights != pytest.approx(by_hand(plan, 9).weights, abs=1e-6)


@pytest.mark.slow_cases("drains1-pipeline=3 schedule=pipedream microbatches=4")
@pytest.mark.parametrize("text", [PLANS[1], PLANS[5]])
@pytest.mark.parametrize("drains", [(), (1,)])
def test_the_rate_of_an_update_is_that_of_the_step_whose_microbatch_it_is_of(
    warm_ranks: Any, text: str, drains: tuple[int, ...]
) -> None:
    """Not of the step in which it happens to be made: stages make it at different times."""
    plan = Plan.parse(text)
    hand = by_hand(plan, 6, drains, halving)
    for ran in warm_ranks(plan.ranks).run(run, text, 6, drains, True):
        assert ran.weights == pytest.approx(hand.weights, abs=1e-12)


def seven(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(step)
    return inputs[:7], targets[:7]


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-vertical"])
def test_replicas_normalise_by_the_batch_of_all(warm_ranks: Any, schedule: str) -> None:
    """Not each by its own samples, of which the second replica has fewer."""
    case = Case(normalised, seven, product_loss, plain_sgd, steps=3, clip=None)
    verdict = verify(case, f"data=2 schedule={schedule}", ranks=warm_ranks(2))
    assert verdict.equal, str(verdict)
