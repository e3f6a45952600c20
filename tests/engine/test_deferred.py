"""Steps whose numbers nobody reads, as on a CUDA device: the same training, and errors that come later."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.engine import Engine, updates
from echelon.errors import UserError
from echelon.launching import Ranks
from tests.cases import adamw, vectors
from tests.data_parallel.test_zero_models import ByRank
from tests.reads import HasReadError, no_reads

Warm = Callable[[int], Ranks]
Weights = dict[str, Tensor]

NO_SAMPLE = "no replica had a sample that the loss counts"


@contextmanager
def deferring() -> Iterator[None]:
    """Engines that are made inside treat the CPU as a device that must not be waited for."""
    with mock.patch.object(updates, "reads_late", return_value=True):
        yield


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5))


def counted(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Only samples with a target of 0 or more count."""
    counts = targets >= 0
    losses = nn.functional.cross_entropy(output.float(), targets.clamp(min=0), reduction="none")
    return (losses * counts).sum(), counts.sum()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Of each step another number of samples counts."""
    inputs, targets = vectors(step)
    return inputs, targets.masked_fill(torch.arange(len(targets)) < step % 3, -1)


def empty_batch() -> tuple[Tensor, Tensor]:
    inputs, targets = vectors(50)
    return inputs, torch.full_like(targets, -1)


def engine_of(plan: str) -> Engine:
    clip = None if "pipedream" in plan else 0.5
    return echelon.parallelize(model(), plan, optimizer=adamw, loss=counted, clip=clip, smallest_unit=0)


def train(plan: str, *, deferred: bool, steps: int = 6) -> tuple[list[tuple[float, float, int]], Weights]:
    """The metrics, read after all steps, and the weights."""
    with deferring() if deferred else nullcontext():
        engine = engine_of(plan)
    metrics = [engine.step(engine.local(batch(step))) for step in range(steps)]
    weights = engine.full_state_dict()
    engine.close(restore=False)
    return [(each.loss, each.grad_norm, each.tokens) for each in metrics], weights


def train_twice(plan: str) -> tuple[bool, float]:
    """Whether all metrics agree, and the largest difference of weights."""
    direct, weights = train(plan, deferred=False)
    late, late_weights = train(plan, deferred=True)
    agree = all(one == pytest.approx(two, rel=1e-5) for one, two in zip(direct, late, strict=True))
    return agree, max(float((late_weights[name] - weights[name]).abs().max()) for name in weights)


@pytest.mark.parametrize("plan", ["data=1 precision=fp64", "data=1 microbatches=3 precision=fp64", "data=1"])
def test_the_same_training(plan: str) -> None:
    agree, difference = train_twice(plan)
    assert agree
    assert difference < (1e-12 if "fp64" in plan else 1e-6)


def test_in_bf16_masters_are_the_same_but_for_rounding() -> None:
    agree, difference = train_twice("data=1 precision=bf16")
    assert agree
    assert difference < 1e-2


PLANS = [
    "data=2 precision=fp64",
    "data=2 zero=1 precision=fp64",
    "data=2 zero=2 microbatches=2 precision=fp64",
    "data=2 zero=3 precision=fp64",
    "pipeline=2 microbatches=2 precision=fp64",
    "pipeline=2 schedule=pipedream microbatches=2 precision=fp64",
]


@pytest.mark.parametrize("plan", PLANS)
def test_the_same_training_on_ranks(warm_ranks: Warm, plan: str) -> None:
    for agree, difference in warm_ranks(2).run(train_twice, plan):
        assert agree
        assert difference < 1e-12


def train_without_reads(plan: str) -> list[float]:
    with deferring():
        engine = engine_of(plan)
    # Makes the optimizer's state and agrees on orders. Its numbers would be looked at two steps later.
    assert engine.step(engine.local(batch(0))).loss > 0
    with no_reads():
        metrics = [engine.step(engine.local(batch(step))) for step in range(1, 3)]
        with pytest.raises(HasReadError):
            _ = metrics[0].loss
    losses = [each.loss for each in metrics]
    engine.close(restore=False)
    return losses


@pytest.mark.parametrize("plan", ["data=1", "data=1 microbatches=3", "data=1 precision=bf16"])
def test_a_step_reads_nothing_and_metrics_do_when_somebody_looks(plan: str) -> None:
    assert len(train_without_reads(plan)) == 2


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_of_ranks_reads_nothing(warm_ranks: Warm, plan: str) -> None:
    first, second = warm_ranks(2).run(train_without_reads, plan)
    assert first == second


class Refused:
    """An engine two steps into a training, and then a step in which nothing counts."""

    def __init__(self) -> None:
        with deferring():
            self.engine = engine_of("data=1")
        for step in range(2):
            self.engine.step(batch(step))
        self.before = self.state()
        self.metrics = self.engine.step(empty_batch())

    def state(self) -> list[Tensor]:
        return [each.tensor.clone() for each in self.engine._update.owned()]

    def is_unchanged(self) -> bool:
        return all(map(torch.equal, self.state(), self.before))


def test_a_refused_step_changes_no_bit_and_its_metrics_raise() -> None:
    refused = Refused()
    assert refused.is_unchanged()
    with pytest.raises(UserError, match=NO_SAMPLE):
        _ = refused.metrics.loss
    with pytest.raises(UserError, match=NO_SAMPLE):
        refused.engine.synchronize()  # here every rank hears of it, also those that have not looked
    assert refused.engine.full_state_dict(), "and then the training goes on"
    assert refused.engine.steps == 2, "it made no update"


def test_a_refused_step_that_nobody_looks_at_raises_in_the_second_step_after_it() -> None:
    refused = Refused()
    following = refused.engine.step(batch(2))
    with pytest.raises(UserError, match=NO_SAMPLE):
        refused.engine.step(batch(3))
    assert refused.engine.steps == 3
    assert following.loss > 0
    assert refused.engine.step(batch(3)).loss > 0


@pytest.mark.parametrize("look", ["synchronize", "evaluate", "full_state_dict", "owned", "close"])
def test_a_refused_step_raises_before_anybody_sees_the_state(look: str) -> None:
    refused = Refused()
    arguments = [batch(0)] if look == "evaluate" else []
    with pytest.raises(UserError, match=NO_SAMPLE):
        getattr(refused.engine, look)(*arguments)
    assert refused.is_unchanged()


def test_where_numbers_are_read_at_once_the_step_itself_raises() -> None:
    engine = engine_of("data=1")
    engine.step(batch(0))
    before = engine.full_state_dict()
    with pytest.raises(UserError, match=NO_SAMPLE):
        engine.step(empty_batch())
    assert engine.steps == 1
    assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())


def run_different_modules() -> tuple[bool, str]:
    """Whether the weights are as before, and the error."""
    torch.manual_seed(0)
    with deferring():
        engine = echelon.parallelize(
            ByRank(), "data=2 zero=3", optimizer=adamw, loss=counted, smallest_unit=0, prefetch=0
        )
    before = [each.tensor.clone() for each in engine._update.owned()]
    metrics = engine.step(engine.local(batch(1)))
    same = all(map(torch.equal, [each.tensor for each in engine._update.owned()], before))
    try:
        _ = metrics.loss
    except UserError as error:
        with pytest.raises(UserError, match="ranks ran different modules"):
            engine.close(restore=False)
        return same, str(error)
    return same, ""


def test_ranks_that_ran_different_modules_hear_of_it_later(warm_ranks: Warm) -> None:
    for same, error in warm_ranks(2).run(run_different_modules):
        assert same
        assert "ranks ran different modules in this step" in error
