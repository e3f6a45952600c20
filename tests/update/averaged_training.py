"""Trainings with an average of the weights, on ranks and in plain torch with its AveragedModel."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from echelon import UserError, parallelize
from echelon.engine import Engine
from tests.cases import adamw, mean_loss
from tests.engine.test_deferred import deferring

WIDTH, SAMPLES, STEPS, DECAY = 8, 8, 6, 0.9
TABLE = {"0": "replicated", "1": "column", "3": "row", "5": "replicated"}
State = dict[str, Tensor]


class Rare(nn.Module):
    """Adds a weight if the first feature is above 100: in some steps it has no gradient, and its average
    moves all the same. Nothing uses `unused`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(2))
        self.frozen = nn.Parameter(torch.full((1,), 1.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.weight if x[0, 0] > 100 else x) * self.frozen


def layers() -> nn.Module:
    torch.manual_seed(0)
    linear = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    return nn.Sequential(Rare(), linear[0], nn.Tanh(), linear[1], nn.Tanh(), nn.Linear(WIDTH, 5)).double()


def vectors(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    if step % 3 == 0:
        inputs[:, 0] = 101.0
    return inputs, torch.randint(5, (SAMPLES,), generator=generator)


def make_engine(plan: str, model: nn.Module | None = None, **options: Any) -> Engine:
    given = (
        {"average": DECAY, "optimizer": adamw, "loss": mean_loss}
        | ({"tensor_table": TABLE} if "tensor" in plan else {})
        | options
    )
    precision = "" if "precision" in plan else " precision=fp64"
    return parallelize(layers() if model is None else model, plan + precision, **given)


class Result(NamedTuple):
    """What a rank has after the steps. `is_own`: whether averages are those of the engine's own weights after
    each step, in every bit; `is_back`: whether the weights are what they were before averages were shown."""

    averages: State
    losses: list[float]
    is_own: bool
    is_back: bool


def train_on_rank(plan: str, *, deferred: bool = False) -> Result:
    with deferring() if deferred else nullcontext(), make_engine(plan) as engine:
        losses, is_back = [], True
        for step in range(STEPS):
            engine.step(engine.local(vectors(step)))
            if step % 2 == 0:
                before = engine.full_state_dict()
                with engine.averaged():
                    losses.append(engine.evaluate(engine.local(vectors(100))).loss)
                is_back &= same(engine.full_state_dict(), before)
        averages = engine.full_state_dict(averaged=True)
        with engine.averaged():
            assert same(engine.full_state_dict(), averages)
    return Result(averages, losses, averages_own_weights(plan), is_back)


def averages_own_weights(plan: str) -> bool:
    with make_engine(plan) as engine:
        own: State = {}
        for step in range(STEPS):
            engine.step(engine.local(vectors(step)))
            add(own, engine.full_state_dict())
        return same(engine.full_state_dict(averaged=True), own)


def add(averages: State, weights: State, decay: float = DECAY) -> None:
    """Average as torch does, in place."""
    for name, weight in weights.items():
        averages[name] = averages[name].lerp(weight, 1 - decay) if name in averages else weight.clone()


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def train_plain(
    steps: int = STEPS, make: Callable[[], nn.Module] = layers, skipped: tuple[int, ...] = ()
) -> tuple[State, list[float]]:
    """The averages, and their losses after every second step."""
    model = make()
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    losses = []
    for step in range(steps):
        inputs, targets = vectors(step)
        optimizer.zero_grad()
        if step not in skipped:
            mean_loss(model(inputs), targets).backward()
            optimizer.step()
            averaged.update_parameters(model)
        if step % 2 == 0:
            inputs, targets = vectors(100)
            with torch.no_grad():
                averaged.eval()
                losses.append(mean_loss(averaged(inputs), targets).item())
    return averaged.module.state_dict(), losses


def gap(one: State, other: State) -> float:
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    return ""
