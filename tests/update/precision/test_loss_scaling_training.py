"""Training in fp16: what is too small trains with a loss scale, what is too large is skipped by all ranks.

Equality with one device is in tests/verify/test_fp16.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon import UserError, parallelize
from echelon.engine import Engine, Metrics
from echelon.engine.step.step_counter import MOST_SKIPPED
from echelon.launching import Ranks
from echelon.state.ownership import ENGINE
from echelon.update.precision.loss_scaling import DynamicScale
from tests.cases import counted_loss, mean_loss, sgd
from tests.marked_gradients import overflow
from tests.overflows import WIDTH, marked_model, marked_vectors

WarmRanks = Callable[[int], Ranks]

# Gradients that are too small.


def tiny_loss(output: Tensor, target: Tensor) -> Tensor:
    """A loss whose gradients are below 6e-8, where fp16 is zero."""
    return 1e-7 * F.mse_loss(output, target)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, eps=1e-15)  # the size of gradients does not matter to it


def curve(step: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(step))
    return inputs, 0.5 * torch.sin(inputs.sum(1, keepdim=True))


def losses(plan: str, loss_scale: Any = None) -> tuple[list[float], float]:
    """The losses of 60 steps, and the largest norm of their gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    model.half().float()  # all precisions start from the same weights
    with parallelize(model, plan, optimizer=adam, loss=tiny_loss, loss_scale=loss_scale) as engine:
        metrics = [engine.step(curve(step)) for step in range(60)]
        assert engine.steps == 60
    return [step.loss for step in metrics], max(step.grad_norm for step in metrics)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("loss_scale", [None, 2.0**17])
def test_gradients_that_fp16_rounds_to_zero_train_with_a_loss_scale_only(loss_scale: Any) -> None:
    exact, norm = losses("precision=fp32")
    assert exact[-1] < 0.3 * exact[0], "the model learns"
    assert 0 < norm < 1e-6
    unscaled, unscaled_norm = losses("precision=fp16", loss_scale=1.0)
    assert unscaled_norm == 0.0, "every gradient is zero"
    start = [tiny_loss_at_start(step) for step in range(60)]
    assert unscaled == pytest.approx(start, rel=1e-2), "so nothing is learned"
    scaled, _ = losses("precision=fp16", loss_scale)
    assert scaled == pytest.approx(exact, rel=1e-2)


def tiny_loss_at_start(step: int) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    return float(tiny_loss(model(curve(step)[0]), curve(step)[1]).detach())


# The first step.


def many_vectors(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4096, WIDTH, generator=generator), torch.randint(5, (4096,), generator=generator)


def first_step(plan: str, loss: Any) -> tuple[bool, float]:
    """Whether it is skipped, and its norm. Gradients of the mean are far from an overflow; those of the
    total, 4,096 times as large, are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 5))
    with parallelize(model, plan, optimizer=sgd, loss=loss, loss_scale=4096) as engine:
        metrics = engine.step(engine.local(many_vectors(0)))
        assert metrics.grad_norm < 2.0
        return metrics.skipped, metrics.grad_norm


@pytest.mark.parametrize("loss", [mean_loss, counted_loss])
@pytest.mark.parametrize("plan", ["data=1", "microbatches=4", "schedule=pipedream microbatches=2"])
def test_the_first_step_does_not_overflow_because_no_count_is_known_yet(plan: str, loss: Any) -> None:
    assert not first_step(f"{plan} precision=fp16", loss)[0]


def test_nor_does_that_of_ranks(warm_ranks: WarmRanks) -> None:
    for plan in ("data=2 microbatches=2", "pipeline=2 microbatches=2 schedule=pipedream-2bw"):
        results = warm_ranks(2).run(first_step, f"{plan} precision=fp16", counted_loss)
        assert [skipped for skipped, _ in results] == [False, False]


# Gradients that are too large.


def marked_engine(
    plan: str, layer: int = 0, loss_scale: Any = 1024.0, model: nn.Module | None = None, **options: Any
) -> Engine:
    torch.manual_seed(0)
    model = marked_model(layer, "rows") if model is None else model
    return parallelize(model, plan, optimizer=sgd, loss=mean_loss, loss_scale=loss_scale, **options)


def train(engine: Engine, steps: int, overflowing: Sequence[int] = ()) -> list[Metrics]:
    batches = [marked_vectors(tuple(overflowing), 6, step) for step in range(steps)]
    return [engine.step(engine.local(batch)) for batch in batches]


def state(engine: Engine) -> dict[str, Tensor]:
    """Weights, masters and optimizer state, as they are."""
    weights = engine.full_state_dict()
    kept = engine.full_optimizer_state()
    return weights | {f"{name} {key}": each for name in kept for key, each in kept[name].items()}


def test_a_skipped_step_has_numbers_changes_no_weight_and_keeps_its_number() -> None:
    with marked_engine("precision=fp16", schedule=lambda step: 1.0 + step) as engine:
        train(engine, 1)
        before = state(engine)
        (metrics,) = train(engine, 1, [0])
        assert (metrics.skipped, metrics.grad_norm, metrics.loss_scale) == (True, math.inf, 1024.0)
        assert math.isfinite(metrics.loss)
        assert (engine.steps, engine.skipped_steps) == (1, 1)
        after = state(engine)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        (metrics,) = train(engine, 1)
        assert (metrics.skipped, engine.steps, engine.skipped_steps) == (False, 2, 1)
        assert engine.learning_rate == pytest.approx(0.1 * 3.0), "that of the third step"


def test_skipped_steps_before_the_first_update() -> None:
    """Masters are what the weights are, and momentum starts with the first gradients that count."""
    with marked_engine("precision=fp16") as late, marked_engine("precision=fp16") as prompt:
        for engine, first in ((late, 0), (prompt, 2)):
            for step in range(first, 4):
                engine.step(marked_vectors((0, 1), 6, step))
        assert (late.steps, prompt.steps) == (2, 2)
        assert all(torch.equal(value, state(prompt)[name]) for name, value in state(late).items())


def test_the_scale_falls_with_skipped_steps_and_rises_with_good_ones() -> None:
    rule = DynamicScale(start=256.0, factor=4.0, interval=2)
    with marked_engine("precision=fp16", loss_scale=rule) as engine:
        metrics = train(engine, 7, [0, 3])
        assert [step.loss_scale for step in metrics] == [256.0, 64.0, 64.0, 256.0, 64.0, 64.0, 256.0]
        counters = {each.slice.part: each.tensor for each in engine.owned() if each.slice.name == ENGINE}
        assert (counters["loss scale"].item(), counters["good steps"].item()) == (256.0, 1.0)
        assert (counters["steps"].item(), counters["begun steps"].item()) == (5, 7)


def test_gradients_that_never_are_finite_end_the_training_and_say_why() -> None:
    with marked_engine("precision=fp16", loss_scale=DynamicScale(start=4.0)) as engine:
        train(engine, 1 + MOST_SKIPPED, range(1 + MOST_SKIPPED))  # two of them to come down to 1
        assert engine.skipped_steps == 1 + MOST_SKIPPED
        says = f"not finite in {MOST_SKIPPED} steps in a row at loss scale 1, below which it does not fall"
        with pytest.raises(UserError, match=says):
            train(engine, 1, [0])
        assert not train(engine, 1)[0].skipped, "a batch that can be trained on still is"


def test_a_good_step_in_between_starts_the_count_again() -> None:
    with marked_engine("precision=fp16", loss_scale=1.0) as engine:
        for _ in range(2):
            train(engine, MOST_SKIPPED, range(1, MOST_SKIPPED))
        assert engine.skipped_steps == 2 * (MOST_SKIPPED - 1)


def test_a_step_without_samples_is_still_an_error() -> None:
    def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(output, target, reduction="sum"), (target != -100).sum()

    torch.manual_seed(0)
    model = marked_model(0, "rows")
    with parallelize(model, "precision=fp16", optimizer=sgd, loss=counted, audit="off") as engine:
        inputs, targets = marked_vectors((), 6, 0)
        engine.step((inputs, targets))
        with pytest.raises(UserError, match="no replica had a sample that the loss counts"):
            engine.step((inputs, targets.fill_(-100)))
        assert (engine.steps, engine.skipped_steps) == (1, 0)


class Normed(nn.Module):
    """Running statistics, and gradients that overflow for marked samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return overflow(self.head(self.norm(x)), x[:, :1] > 0.5)


def test_running_statistics_of_a_skipped_step_stay() -> None:
    """As on one device with torch's GradScaler: the forward pass has happened. A refused step undoes it."""
    torch.manual_seed(0)
    alone = Normed().half()
    for step in range(3):
        alone(marked_vectors((1,), 6, step)[0].half())
    with marked_engine("precision=fp16", model=Normed()) as engine:
        train(engine, 3, [1])
        norm = engine.module.norm
        assert engine.skipped_steps == 1
        assert norm.num_batches_tracked == 3
        torch.testing.assert_close(norm.running_mean, alone.norm.running_mean)


# All ranks alike.


class Armed(nn.Module):
    """Gradients that come by overflow while it is armed."""

    is_armed = False

    def forward(self, x: Tensor) -> Tensor:
        return overflow(x, torch.tensor(self.is_armed))


def train_with_overflow(plan: str, rank: int) -> tuple[list[bool], list[float], bool, dict[str, Tensor]]:
    """Four steps, of which the second overflows on one rank: what is skipped, the scales, whether weights
    have stayed, and the weights after the last step."""
    hidden = [nn.Linear(8, 8), Armed(), nn.Tanh(), nn.Linear(8, 8), Armed(), nn.Tanh()]
    scale, table = DynamicScale(start=4096.0), {"0": "column", "3": "row", "6": "replicated"}
    options = {"tensor_table": table} if "tensor" in plan else {}
    model = nn.Sequential(*hidden, nn.Linear(8, 5))
    with marked_engine(plan, loss_scale=scale, model=model, **options) as engine:
        metrics, weights = [], []
        for step in range(4):
            for module in model[:5]:
                module.is_armed = step == 1 and engine.mesh.rank == rank
            metrics.append(engine.step(engine.local(marked_vectors((), 6, step))))
            weights.append(engine.full_state_dict())
        same = all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        skipped = [step.skipped for step in metrics]
        return skipped, [step.loss_scale for step in metrics], same, weights[-1]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 microbatches=2",
        "data=2 zero=3",
        "data=2 sync=parameter-server",
        "data=2 sync=async staleness=0",
        "pipeline=2 microbatches=2",
        "tensor=2",
    ],
)
def test_an_overflow_on_one_rank_is_skipped_by_all(plan: str, rank: int, warm_ranks: WarmRanks) -> None:
    results = warm_ranks(2).run(train_with_overflow, f"{plan} precision=fp16", rank)
    for skipped, scales, same, weights in results:
        assert skipped == [False, True, False, False]
        assert scales == [4096.0, 4096.0, 2048.0, 2048.0]
        assert same, "no weight changes"
        assert all(torch.equal(value, results[0][3][name]) for name, value in weights.items())
