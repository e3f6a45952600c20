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
from echelon.update.precision.loss_scaling import ScaleState
from tests.cases import adamw, vectors
from tests.parallel.data.test_zero_models import ByRank
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
    options = {"clip": clip, "smallest_unit": 0, "audit": "first"}  # an audit reads
    return echelon.parallelize(model(), plan, optimizer=adamw, loss=counted, **options)


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


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_below_float32_masters_are_the_same_but_for_rounding(precision: str) -> None:
    agree, difference = train_twice(f"data=1 precision={precision}")
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


@pytest.mark.slow_cases(
    "data=2 precision=fp64",
    "data=2 zero=1 precision=fp64",
    "data=2 zero=2 microbatches=2 precision=fp64",
    "data=2 zero=3 precision=fp64",
    "pipeline=2 schedule=pipedream microbatches=2 precision=fp64",
)
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


@pytest.mark.parametrize(
    "plan", ["data=1", "data=1 microbatches=3", "data=1 precision=bf16", "data=1 precision=fp16"]
)
def test_a_step_reads_nothing_and_metrics_do_when_somebody_looks(plan: str) -> None:
    assert len(train_without_reads(plan)) == 2


@pytest.mark.parametrize("plan", ["data=1 microbatches=2", "schedule=pipedream microbatches=2"])
def test_steps_that_overflow_are_skipped_without_a_read(plan: str) -> None:
    with deferring():
        engine = engine_of(f"{plan} precision=fp16")
    assert not engine.step(batch(0)).skipped
    scaling = engine._update.loss_scaling
    assert scaling is not None
    scaling.state = ScaleState(torch.full((), 2.0**60, dtype=torch.float64), scaling.state.good_steps)
    before = [each.tensor.clone() for each in engine._local.owned_weights()]
    with no_reads():
        metrics = [engine.step(batch(step)) for step in range(1, 3)]
    assert [(each.skipped, each.loss_scale) for each in metrics] == [(True, 2.0**60), (True, 2.0**59)]
    engine.synchronize()
    assert all(map(torch.equal, [each.tensor for each in engine._local.owned_weights()], before))
    assert engine.skipped_steps == 2
    engine.close(restore=False)


FP16_PLANS = ["data=2 zero=1 precision=fp16", "pipeline=2 schedule=pipedream microbatches=2 precision=fp16"]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("plan", [*PLANS, *FP16_PLANS])
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


class Normalised(nn.Sequential):
    """Running statistics and dropout: both depend on which steps there were."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 5))


def refused_in_the_middle(plan: str, *, deferred: bool, first: int = 2) -> tuple[list[int], int, Weights]:
    """The numbers for which the schedule was asked, the updates, and the weights; step `first` is refused."""
    numbers: list[int] = []

    def schedule(number: int) -> float:
        numbers.append(number)
        return 1.0 / (1 + number)

    torch.manual_seed(0)
    with deferring() if deferred else nullcontext():
        engine = echelon.parallelize(
            Normalised(), plan, optimizer=adamw, loss=counted, schedule=schedule, seed=3, audit="first"
        )
    batches = [*map(batch, range(first)), empty_batch(), *map(batch, range(first, 5))]
    errors = 0
    while batches:
        try:
            engine.step(engine.local(batches[0]))
        except UserError as error:
            assert NO_SAMPLE in str(error)
            errors += 1
            if deferred:
                continue  # the call can be repeated
        batches.pop(0)
    assert errors == 1
    weights = engine.full_state_dict()
    engine.close(restore=False)
    return numbers, engine.steps, weights


def refused_both_ways(plan: str, first: int) -> tuple[list[int], int, Weights]:
    """Of the deferred training, which must be the same."""
    direct = refused_in_the_middle(plan, deferred=False, first=first)
    late = refused_in_the_middle(plan, deferred=True, first=first)
    assert late[:2] == direct[:2]
    for name, value in direct[2].items():
        # A bias before batch norm has a gradient of nothing but rounding.
        assert torch.allclose(late[2][name], value, rtol=0, atol=1e-11), name
    return late


def test_after_a_refused_step_training_goes_on_alike_wherever_it_was_refused() -> None:
    # The number after it was used twice, and only where numbers are read late.
    numbers, updates, weights = refused_both_ways("data=1 precision=fp64", first=2)
    assert numbers == [0, 1, 2, 3, 4, 5]
    assert updates == 5
    assert weights["1.num_batches_tracked"] == 5


@pytest.mark.parametrize(
    ("plan", "first"),
    [("data=2 precision=fp64", 0), ("pipeline=2 precision=fp64", 2)],
)
def test_after_a_refused_step_ranks_go_on_together(warm_ranks: Warm, plan: str, first: int) -> None:
    # On the CPU a pipeline raised in the middle of its program, and had to be started again.
    one, two = warm_ranks(2).run(refused_both_ways, plan, first)
    assert one[:2] == two[:2]
    assert all(torch.equal(one[2][name], two[2][name]) for name in one[2])


@pytest.mark.parametrize("deferred", [False, True])
def test_a_refused_step_changes_no_buffer(deferred: bool) -> None:
    # Statistics of samples that were refused stayed, and were sent to every replica.
    with deferring() if deferred else nullcontext():
        engine = echelon.parallelize(Normalised(), "data=1", optimizer=adamw, loss=counted)
    engine.step(batch(0))
    before = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    with nullcontext() if deferred else pytest.raises(UserError, match=NO_SAMPLE):
        engine.step(empty_batch())
    assert before.keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert all(torch.equal(buffer, before[name]) for name, buffer in engine.module.named_buffers())
    engine.step(batch(1))
    assert engine.module[1].num_batches_tracked == 2


@pytest.mark.parametrize("deferred", [False, True])
def test_a_step_that_a_check_refuses_changes_no_buffer(deferred: bool) -> None:
    with deferring() if deferred else nullcontext():
        options = {"optimizer": adamw, "loss": lambda *_: "no loss", "audit": "off"}
        engine = echelon.parallelize(Normalised(), "data=1", **options)
    with pytest.raises(UserError, match="loss"):
        engine.step(batch(0))
    assert engine.module[1].num_batches_tracked == 0


def orders_agreed_on(deferred: bool) -> list[int]:
    """How often the ranks have agreed on an order of gradients, after a refused step and after an update."""
    with deferring() if deferred else nullcontext():
        engine = engine_of("data=2")
    agreements = []
    for samples in (empty_batch(), batch(1)):
        with nullcontext() if deferred or agreements else pytest.raises(UserError, match=NO_SAMPLE):
            engine.step(engine.local(samples))
        agreements.append(engine.ledger.total(subject="order").count)
    return agreements


@pytest.mark.parametrize("deferred", [False, True])
def test_a_refused_first_step_does_not_set_the_order_of_gradients(warm_ranks: Warm, deferred: bool) -> None:
    assert warm_ranks(2).run(orders_agreed_on, deferred) == [[0, 1]] * 2


class ByRankLater(ByRank):
    """In the first step, where ranks compare what they gather, all run the same layer."""

    is_later = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.is_later else self.left(x)  # type: ignore[no-any-return]


def run_different_modules() -> tuple[bool, str]:
    """Whether the weights are as before, and the error."""
    torch.manual_seed(0)
    options = {"smallest_unit": 0, "prefetch": 0}
    model = ByRankLater()
    with deferring():
        engine = echelon.parallelize(model, "data=2 zero=3", optimizer=adamw, loss=counted, **options)
    engine.step(engine.local(batch(1)))
    before = [each.tensor.clone() for each in engine._update.owned()]
    model.is_later = True
    with pytest.raises(UserError) as refusal:
        _ = engine.step(engine.local(batch(2))).loss
    same = all(map(torch.equal, [each.tensor for each in engine._update.owned()], before))
    engine._release(failed=True)
    return same, str(refusal.value)


def test_ranks_that_run_different_modules_later_hear_of_it(warm_ranks: Warm) -> None:
    for same, error in warm_ranks(2).run(run_different_modules):
        assert same
        assert "ranks ran different modules in this step" in error
