"""Trainings with a batch that is not finite, on ranks and in plain torch, which leaves its update out."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon import parallelize
from echelon.engine import Engine
from echelon.models import cross_entropy
from echelon.nn.experts import SoftmaxGate
from tests.cases import adamw, mean_loss, random_tokens
from tests.engine.test_deferred import deferring
from tests.marked_gradients import explode
from tests.nn.experts import models as experts
from tests.parallel.tensor.models import gpt, tokens

WIDTH, STEPS, SAMPLES = 8, 6, 8
TABLE = {"0.linear": "column", "1.linear": "row", "2.linear": "replicated", "3": "replicated"}
MARK = 1  # a target
State = dict[str, Tensor]


class Layer(nn.Module):
    """Samples with a first feature above 100 have an infinite gradient here, where the layer is `armed`."""

    def __init__(self, *, is_armed: bool = False) -> None:
        super().__init__()
        self.is_armed, self.linear = is_armed, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return torch.tanh(explode(hidden, x[:, :1] > 100) if self.is_armed else hidden)


def layers(*, is_armed: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(is_armed=is_armed), Layer(), Layer(), nn.Linear(WIDTH, 5)).double()


class Poison(NamedTuple):
    """In which steps, and by what: "input" (NaN in one sample), "gradient" (infinite), or "loss"."""

    kind: str
    steps: Sequence[int] = (2, 3)


def vectors(step: int, poison: Poison | None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(5, (SAMPLES,), generator=generator)
    if poison is not None and step in poison.steps:
        inputs[5, 0] = torch.nan if poison.kind == "input" else 1000.0
    return inputs, targets


def marked_tokens(make: Callable[[int], Any], step: int, poison: Poison | None) -> tuple[Tensor, Tensor]:
    inputs, targets = make(step)
    targets = targets.masked_fill(targets == MARK, 2)
    if poison is not None and step in poison.steps:
        targets[5, -1] = MARK
    return inputs, targets


def marked_loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Not a number where a target is marked."""
    total, count = cross_entropy(output, targets)
    return total * torch.where((targets == MARK).any(), torch.nan, 1.0), count


class Training(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[int, Poison | None], tuple[Tensor, Tensor]]
    loss: Callable[[Any, Any], Any]


def training_of(plan: str, poison: Poison | None) -> Training:
    """Of a model that the plan can divide."""
    if "expert" in plan:
        return Training(
            lambda: seeded(mixture), lambda *given: marked_tokens(expert_tokens, *given), marked_loss
        )
    if "context" in plan:
        return Training(lambda: seeded(gpt), lambda *given: marked_tokens(tokens, *given), marked_loss)
    is_armed = poison is not None and poison.kind == "gradient"
    return Training(lambda: layers(is_armed=is_armed), vectors, mean_loss)


def expert_tokens(step: int) -> tuple[Tensor, Tensor]:
    return random_tokens(step, (SAMPLES, experts.SEQUENCE), experts.VOCAB)


def mixture() -> nn.Module:
    return experts.make_model(lambda: SoftmaxGate(experts.WIDTH, experts.EXPERTS, 2, normalize=True))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def rate(step: int) -> float:
    return 1.0 / (1 + step)


def poisoned_engine(plan: str, training: Training, **options: Any) -> Engine:
    table = {"tensor_table": TABLE} if "tensor" in plan else {}
    given = {"nonfinite": "skip", "clip": 0.5} | table | options
    return parallelize(
        training.make(),
        f"{plan} precision=fp64",
        optimizer=adamw,
        loss=training.loss,
        schedule=rate,
        **given,
    )


def train_on_rank(plan: str, poison: Poison, *, deferred: bool = False, **options: Any) -> dict[str, Any]:
    """What a rank has after the steps, and what it has heard of them."""
    training = training_of(plan, poison)
    with deferring() if deferred else nullcontext(), poisoned_engine(plan, training, **options) as engine:
        metrics = [engine.step(engine.local(training.batch(step, poison))) for step in range(STEPS)]
        engine.synchronize()
        return {
            "state": full_state(engine),
            "skipped": [each.skipped for each in metrics],
            "counts": (engine.steps, engine.skipped_steps),
        }


def full_state(engine: Engine) -> State:
    kept = engine.full_optimizer_state()
    flat = {f"{name} {part}": each for name in kept for part, each in kept[name].items()}
    return engine.full_state_dict() | flat


def train_plain(plan: str, poison: Poison) -> State:
    """The same on one device, in plain torch: steps that are poisoned are left out, and keep their number."""
    training = training_of(plan, poison)
    model = training.make()
    optimizer = adamw(model.parameters())
    full_rate = optimizer.param_groups[0]["lr"]
    for step in range(STEPS):
        if step in poison.steps:
            continue
        inputs, targets = training.batch(step, poison)
        result = training.loss(model(inputs), targets)
        loss = result[0] / result[1] if isinstance(result, tuple) else result
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = full_rate * rate(step)
        optimizer.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    kept = {
        f"{names[parameter]} {part}": value
        for parameter, state in optimizer.state.items()
        for part, value in state.items()
    }
    return model.state_dict() | kept
