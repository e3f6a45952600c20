"""One more number from the forward of an evaluation."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.collectives import RecordingGroup
from echelon.engine.step.metrics import Measuring, agree_on_means, check_measure
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import cross_entropy
from echelon.parallel.observer import LossPass
from echelon.plan import Plan
from tests.cases import adamw, masked_vectors


def num_right(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return (output.argmax(dim=-1) == targets).sum(), (targets != -100).sum()


def all_kinds(output: Tensor, targets: Tensor) -> dict[str, Any]:
    largest = output.double().amax(dim=-1)
    return {"right": num_right(output, targets), "mean": largest.mean(), "float": float(largest.mean())}


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5)).double()


def batch() -> tuple[Tensor, Tensor]:
    """11 samples, which no number of ranks or microbatches divides; some do not count."""
    inputs, targets = (each[:11] for each in masked_vectors(3))
    assert (targets == -100).any()
    return inputs.double(), targets


def evaluate(plan: str) -> list[Any]:
    with echelon.parallelize(model(), plan, optimizer=adamw, loss=cross_entropy) as engine:
        local = engine.local(batch())
        kinds, pair = engine.evaluate(local, all_kinds), engine.evaluate(local, num_right)
        measured = engine.step(local, all_kinds).measured
        assert measured == pytest.approx(kinds.measured, rel=1e-12)
        assert engine.step(local).measured is None
        return [kinds, pair.measured, engine.evaluate(local).measured]


PLANS = ["data=2 microbatches=5", "data=2", "pipeline=2 microbatches=3", "data=2 zero=3 microbatches=2"]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("plan", PLANS)
def test_means_are_those_of_one_device(plan: str, warm_ranks: Callable[[int], Ranks]) -> None:
    inputs, targets = batch()
    output = model()(inputs)
    counted = int((targets != -100).sum())
    right = int(num_right(output, targets)[0]) / counted
    mean = float(output.detach().amax(dim=-1).mean())
    for kinds, pair, nothing in warm_ranks(2).run(evaluate, f"{plan} precision=fp64"):
        assert kinds.tokens == counted
        assert kinds.measured == pytest.approx({"right": right, "mean": mean, "float": mean}, rel=1e-12)
        assert kinds.loss == pytest.approx(cross_entropy(output, targets)[0].item() / counted, rel=1e-12)
        assert pair == right
        assert nothing is None


def measured_losses(plan: str) -> list[tuple[float, Any]]:
    with echelon.parallelize(
        model(), f"{plan} precision=fp64", optimizer=adamw, loss=cross_entropy
    ) as engine:
        steps = [engine.step(engine.local(batch()), cross_entropy) for _ in range(3)]
        return [(metrics.loss, metrics.measured) for metrics in steps]


@pytest.mark.parametrize(
    "plan", ["update=backward", "data=2 microbatches=2", "pipeline=2 schedule=pipedream microbatches=3"]
)
def test_a_step_measures_what_its_losses_saw(plan: str, warm_ranks: Callable[[int], Ranks]) -> None:
    """Also where the first step is rehearsed, or weights change between microbatches."""
    for losses in warm_ranks(1 if plan == "update=backward" else 2).run(measured_losses, plan):
        assert losses[0][0] != losses[1][0]
        for loss, measured in losses:
            assert measured == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2), r"measure must return a mean .* got a tensor of torch.float32 and shape \[2\]"),
        ((1, 2, 3), "got a tuple of 3"),
        ((torch.zeros(2), 2), "got a tuple of 2"),
        ("0.5", "got str"),
        ({"right": None}, "measure's 'right' must return .* got NoneType"),
        ({1: 0.5}, "keys .* must be strings"),
        (3, r"returned int: an integer is a total.*return \(total, count\)"),
        ({"right": torch.tensor(3)}, "measure's 'right' returned a tensor of torch.int64 .* is a total"),
    ],
)
def test_what_is_no_measure_is_refused(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Measuring(lambda *_: value).after_loss(loss_of(torch.zeros(2)))


def loss_of(output: Tensor, *, counts: bool = True) -> LossPass:
    return LossPass(output, None, torch.zeros(()), len(output), counts)


def test_what_only_fills_up_does_not_count() -> None:
    measuring = Measuring(lambda output, _: output.mean())
    measuring.after_loss(loss_of(torch.ones(2)))
    measuring.after_loss(loss_of(torch.ones(5), counts=False))
    measuring.after_loss(loss_of(torch.zeros(1)))
    assert measuring.sums[""].tolist() == [2, 3]


def test_a_mean_over_nothing_is_not_a_number() -> None:
    group = RecordingGroup("all")
    mean = agree_on_means({"": torch.zeros(2, dtype=torch.float64)}, group, torch.device("cpu"))
    assert isinstance(mean, float)
    assert math.isnan(mean)


def test_where_ranks_must_not_wait_it_is_refused() -> None:
    check_measure(num_right, Plan.parse("data=2 sync=async"))
    with pytest.raises(UserError, match="workers train without waiting"):
        check_measure(num_right, Plan.parse("data=2 sync=async"), trains=True)
