"""The replay against the plainest training, where the two must be the same, and where they must differ."""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.update.update import Push
from echelon.verify import Case
from echelon.verify.reference import train_on_one_device
from echelon.verify.replay import replay
from tests.cases import counted_loss, masked_vectors, perceptron_case
from tests.update.async_training.training import largest_gap

CASE = perceptron_case(masked_vectors, counted_loss, steps=4)


def test_rounds_of_all_workers_are_training_on_one_device() -> None:
    log = [Push(worker, step, step, step + 1) for step in range(4) for worker in range(3)]
    replayed = replay(log, CASE, workers=3)
    plain = train_on_one_device(CASE)
    assert largest_gap(replayed.weights, plain.weights) <= 1e-12
    state = replayed.optimizer
    assert all(largest_gap(state[name], plain.optimizer[name]) <= 1e-12 for name in state)
    assert abs(replayed.evaluation - plain.evaluation) <= 1e-12


def test_a_stale_gradient_is_taken_at_the_version_it_says() -> None:
    """Two plain gradient steps by hand: both at version 0."""
    case = perceptron_case(steps=1, make_optimizer=lambda p: torch.optim.SGD(p, lr=0.5), clip=None)
    weights = replay([Push(0, 0, 0, 1), Push(1, 0, 0, 2)], case, workers=2).weights
    model = case.build()
    inputs, targets = case.batches()[0]
    start = model.first.weight.detach().clone()
    loss = case.loss(model(inputs[:6]), targets[:6]) + case.loss(model(inputs[6:]), targets[6:])
    loss.backward()
    assert torch.allclose(weights["first.weight"], start - 0.5 * model.first.weight.grad, atol=1e-12)
    fresh = replay([Push(0, 0, 0, 1), Push(1, 0, 1, 2)], case, workers=2).weights
    assert largest_gap(weights, fresh) > 1e-4


# The learning rate of a version. The gradient of these trainings is 2 whatever the weight, so that the end
# does not depend on which worker comes first, and can be written down.

RATE, STEPS = 0.25, 3


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def twos(_: int) -> tuple[Tensor, Tensor]:
    return torch.full((4, 1), 2.0), torch.zeros(4)


def mean_output(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def halving(version: int) -> float:
    return 0.5**version


SCALE = Case(Scale, twos, mean_output, plain_sgd, steps=STEPS, clip=None)
HALVED = dataclasses.replace(SCALE, options={"schedule": halving})


def after_updates(number: int) -> float:
    """The weight after so many updates, of which the first has the whole rate."""
    return 1.0 - sum(2 * RATE * halving(version) for version in range(number))


def test_a_replay_takes_the_rate_of_the_version_that_it_updates() -> None:
    log = [Push(0, 0, 0, 1), Push(1, 0, 0, 2), Push(0, 1, 1, 3)]
    weight = replay(log, HALVED, workers=2).weights["weight"]
    assert weight.item() == pytest.approx(after_updates(3), abs=1e-12)
    assert after_updates(3) == 1 - 0.5 - 0.25 - 0.125
    unscheduled = replay(log, SCALE, workers=2).weights["weight"]
    assert unscheduled.item() == pytest.approx(1 - 3 * 0.5, abs=1e-12)


def test_a_round_of_the_replay_is_one_update_with_one_rate() -> None:
    log = [Push(worker, step, step, step + 1) for step in range(2) for worker in range(2)]
    weight = replay(log, HALVED, workers=2).weights["weight"]
    assert weight.item() == pytest.approx(after_updates(2), abs=1e-12)


class Scheduled(NamedTuple):
    weight: float
    rates: list[float]  # that the engine reports after each step
    log: list[Push]


def train_scheduled(staleness: str) -> Scheduled:
    plan = f"data=2 sync=async staleness={staleness} precision=fp64"
    engine = echelon.parallelize(Scale(), plan, optimizer=plain_sgd, loss=mean_output, schedule=halving)
    rates = []
    for step in range(STEPS):
        engine.step(engine.local(twos(step)))
        rates.append(engine.learning_rate)
    trained = Scheduled(engine.full_state_dict()["weight"].item(), rates, engine.log())
    engine.close()
    return trained


@pytest.mark.slow_cases("1-6", "inf-6")
@pytest.mark.parametrize(("staleness", "updates"), [("0", STEPS), ("1", 2 * STEPS), ("inf", 2 * STEPS)])
def test_asynchronous_updates_take_the_rate_of_their_version(staleness: str, updates: int) -> None:
    """A schedule that is one version off ends at another weight: it was not found once."""
    results = echelon.launch(train_scheduled, 2, staleness)
    for trained in results:
        assert trained.weight == pytest.approx(after_updates(updates), abs=1e-12)
        assert max(entry.pushed for entry in trained.log) == updates
    # Worker 0 shares the process, and the optimizer, of the server: its rate may be that of a later update.
    versions = [entry.pushed - 1 for entry in results[1].log if entry.worker == 1]
    assert results[1].rates == pytest.approx([RATE * halving(version) for version in versions])
