"""Trainings whose model or loss keeps something from one call to the next, which torch knows nothing of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.foreign.proof import Foreign, Trained, engine_training

WIDTH, SAMPLES, STEPS = 8, 8, 5
LARGE = 2.0  # a number of the fifth batch alone is larger


def vectors(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(900 + step)
    values = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return values, torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


def stack() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))


@dataclass
class Count:
    calls: int = 0


_count = Count()
_calls = 0


class WarmsUp(nn.Module):
    """Its output grows with the number of its calls, which `kind` keeps."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.kind, self.own = stack(), kind, Count()
        global _calls
        _calls = _count.calls = 0

    def forward(self, values: Tensor) -> Tensor:
        global _calls
        if self.kind == "global":
            _calls += 1
            calls = _calls
        else:
            count = self.own if self.kind == "object" else _count
            count.calls += 1
            calls = count.calls
        return self.body(values) * (1 + 0.1 * calls)


class CountingLayer(nn.Module):
    """Its output grows with the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, values: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.linear(values)) * (1 + 0.1 * self.calls)


class CountingStack(nn.Module):
    """Counts its calls in its layers and in itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.calls = nn.ModuleList([CountingLayer() for _ in range(3)]), 0

    def forward(self, values: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            values = block(values)
        return values * (1 + 0.1 * self.calls)


class Follows(nn.Module):
    """A frozen copy of a layer, which each forward moves towards it."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.copy = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, values: Tensor) -> Tensor:
        with torch.no_grad():
            for frozen, weight in zip(self.copy.parameters(), self.online.parameters(), strict=True):
                frozen.lerp_(weight, 0.1)
        return self.online(values) + self.copy(values)


class Branches(nn.Module):
    """Mixes samples from its fifth call on, or wherever a number of its input is large."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.kind, self.calls = stack(), kind, 0

    def forward(self, values: Tensor) -> Tensor:
        self.calls += 1
        output: Tensor = self.body(values)
        if self.calls > 4 if self.kind == "count" else float(values[:, 1].max()) > LARGE:
            output = output - output.mean(0)
        return output


class Measures(nn.Module):
    """Keeps a running mean of its output, which evaluation alone subtracts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.body(values)
        if not self.training:
            return output - self.mean
        with torch.no_grad():
            self.mean.lerp_(output.mean(0), 0.1)
        return output


class RunningMean:
    """Divides by the mean of all losses so far."""

    def __init__(self) -> None:
        self.mean: float | None = None

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(output, targets)
        self.mean = loss.item() if self.mean is None else 0.9 * self.mean + 0.1 * loss.item()
        return loss / self.mean


class Centred(nn.Module):
    """Keeps a running mean of outputs in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(output - self.centre, targets)
        with torch.no_grad():
            self.centre.lerp_(output.mean(0), 0.1)
        return loss


def annealed() -> Callable[[Tensor, Tensor], Tensor]:
    calls = 0

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return F.mse_loss(output, targets) * (1 + 0.1 * calls)

    return loss


def noisy() -> Callable[[Tensor, Tensor], Tensor]:
    """A generator of the loss's own: one number for all samples."""
    generator = torch.Generator().manual_seed(2)
    return lambda output, targets: F.mse_loss(output, targets) * (1 + torch.rand((), generator=generator))


def with_loss(make: Callable[[], Callable[[Tensor, Tensor], Tensor]]) -> Foreign:
    """A new loss for each training: it is made with the model."""
    made: list[Any] = []

    def model() -> nn.Module:
        made[:] = [make()]
        return stack()

    return Foreign(model, vectors, lambda output, targets: made[0](output, targets), steps=STEPS)


MEMORIES: dict[str, Foreign] = {
    **{
        f"counts in {kind}": Foreign(lambda kind=kind: WarmsUp(kind), vectors, F.mse_loss, steps=STEPS)
        for kind in ("object", "shared object", "global")
    },
    "counts in attributes": Foreign(
        CountingStack, vectors, F.mse_loss, steps=STEPS, options={"layers": "blocks"}
    ),
    "follows in its forward": Foreign(Follows, vectors, F.mse_loss, steps=STEPS),
    "a mean for evaluation": Foreign(Measures, vectors, F.mse_loss, steps=STEPS),
    **{
        f"branches by a {kind}": Foreign(lambda kind=kind: Branches(kind), vectors, F.mse_loss, steps=7)
        for kind in ("count", "number")
    },
    "loss with a running mean": with_loss(RunningMean),
    "loss with a centre": with_loss(Centred),
    "loss that counts": with_loss(annealed),
    "loss that draws": with_loss(noisy),
}


def train_memory(name: str, plan: str) -> Trained | str:
    """In each rank, where the case has its own memory."""
    return engine_training(MEMORIES[name], plan)
