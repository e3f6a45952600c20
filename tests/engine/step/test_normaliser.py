"""Losses are divided by the count of their update before the backward pass, so that functions of gradients
that are not linear see those of the mean, as on one device."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon.engine.step import normaliser
from echelon.engine.step.normaliser import Counts, StepNormaliser, count_targets
from echelon.verify import Case, assert_equal
from tests.cases import sgd
from tests.reads import no_reads

pytestmark = pytest.mark.usefixtures("warm_contract")


class _Clamp(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Any) -> Any:
        return gradient.clamp(-0.01, 0.01)


class Clamped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        function: Any = _Clamp
        result: Tensor = function.apply(x)
        return result


def clamped() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Clamped(), nn.Linear(8, 8), Clamped(), nn.Linear(8, 5))


def uneven(step: int) -> tuple[Tensor, Tensor]:
    """Of 7 samples, and in every third step of 3."""
    generator = torch.Generator().manual_seed(step)
    samples = 3 if step % 3 == 2 else 7
    x = torch.randn(samples, 6, generator=generator)
    return x, torch.randint(5, (samples,), generator=generator).masked_fill(x[:, 0] > 0.8, -100)


def even(step: int) -> tuple[Tensor, Tensor]:
    x, targets = uneven(step)
    return x, targets.clamp(min=0)


def mean(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets)


def pair(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, targets, reduction="sum"), (targets != -100).sum()


def weighted(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A count that is of nothing in the targets."""
    weights = torch.arange(1, 6, dtype=output.dtype)
    return F.cross_entropy(output, targets, weights, reduction="sum"), weights[targets].sum()


def squares(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return (output - F.one_hot(targets, 5)).square().sum(), len(targets)


MEAN = Case(clamped, even, mean, sgd, steps=6, clip=0.05)
PAIR = replace(MEAN, make_batch=uneven, loss=pair)


@pytest.mark.quick_cases(2)
@pytest.mark.slow_cases(
    "case11-data=1",
    "case5-pipeline=1-2 microbatches=2",
    "case7-data=1",
    "case8-microbatches=3",
    "case9-data=2",
)
@pytest.mark.parametrize(
    ("case", "plan"),
    [
        (MEAN, "data=1"),
        (MEAN, "microbatches=2"),
        (MEAN, "data=2"),
        (MEAN, "data=2 zero=3 microbatches=2"),
        (MEAN, "pipeline=2 microbatches=2"),
        (MEAN, "pipeline=1-2 microbatches=2"),
        (MEAN, "data=2 sync=async staleness=0"),
        (PAIR, "data=1"),
        (PAIR, "microbatches=3"),
        (PAIR, "data=2"),
        (PAIR, "data=2 pipeline=2 microbatches=2 schedule=zero-bubble"),
        (replace(MEAN, loss=weighted), "data=1"),
        (replace(MEAN, loss=squares), "microbatches=2"),
    ],
)
def test_gradients_that_are_clamped_are_those_of_the_mean(case: Case, plan: str) -> None:
    """The first step's backward passes began at the sum over samples, and later ones' at the sum over the
    count of the step before."""
    if "async" in plan:  # nobody counts the samples of others there
        case = replace(case, make_batch=of_six)
    assert_equal(case, plan)


def of_six(step: int) -> tuple[Tensor, Tensor]:
    x, targets = even(3 * step)
    return x[:6], targets[:6]


def test_pipedream_updates_by_the_mean_of_each_microbatch() -> None:
    assert_equal(replace(MEAN, clip=None), "schedule=pipedream microbatches=2")


@pytest.mark.parametrize("count", [0, 5])
def test_a_step_of_one_loss_is_divided_by_its_count_wherever_that_is(count: float) -> None:
    normaliser = StepNormaliser(9, lambda: (Counts(9, 9, 9), None), is_only=True, local=None)
    assert normaliser.of_loss(count, None, is_pair=True) == (count or 1)
    with no_reads():
        on_device = normaliser.of_loss(torch.tensor(count), None, is_pair=True)
    assert float(on_device) == (count or 1)


def test_targets_are_counted_once_a_loss_needs_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean does not, from the second step on."""
    calls: list[int] = []

    def count(*arguments: Any) -> Counts:
        calls.append(1)
        return count_targets(*arguments)

    monkeypatch.setattr(normaliser, "count_targets", count)
    losses: list[Callable[..., Any]] = [mean, mean, mean, pair, pair, mean]

    def loss(output: Tensor, targets: Tensor) -> Any:
        return losses[0](output, targets)

    plan = "microbatches=2 precision=fp64"
    engine = echelon.parallelize(clamped(), plan, optimizer=sgd, loss=loss, audit="off")
    counts = []
    while losses:
        calls.clear()
        engine.step(even(0))
        counts.append(len(calls) > 0)
        losses.pop(0)
    assert counts == [True, False, False, True, True, True]


def test_what_a_loss_may_count() -> None:
    targets = torch.tensor([[1, -100, 3], [2, 0, -100]])
    assert count_targets(targets, 2) == Counts(2, 6, 4)
    assert count_targets(targets.float(), 2) == Counts(2, 6, 6)
    assert count_targets({"a": targets, "b": targets}, 2) == Counts(2, 2, 2)
    assert count_targets(None, 2) == Counts(2, 2, 2)


def test_the_first_backward_pass_of_a_plain_loop() -> None:
    """By the letter of the contract: a hook sees the same numbers as in a loop without echelon."""
    seen: dict[str, list[Tensor]] = {"loop": [], "engine": []}
    x, targets = even(0)

    def model(name: str) -> nn.Module:
        torch.manual_seed(0)
        made = nn.Linear(6, 5)
        made.weight.register_hook(lambda gradient: seen[name].append(gradient.clone()))
        return made

    mean(model("loop")(x), targets).backward()
    make: Callable[[Any], torch.optim.Optimizer] = sgd
    with echelon.parallelize(model("engine"), "data=1", optimizer=make, loss=mean, audit="off") as engine:
        engine.step((x, targets))
    torch.testing.assert_close(seen["engine"], seen["loop"])
