"""Models and losses that are right on one device, and look right in the first batch of a plan they break.

A   the loss's denominator varies in later batches only
C   gradients alone differ
D   what a comparison of forwards must skip: autograd inside of the loss, state, statistics beside draws
H   a loss that is kept on a module, and read by the user's loss
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.foreign.proof import Foreign, Trained, engine_training

WIDTH, SAMPLES, LENGTH, CLASSES = 6, 8, 5, 7


def body() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, CLASSES)
    )


def random(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(900 + step), dtype=torch.float64)


def classes(step: int, *shape: int) -> Tensor:
    return torch.randint(1, CLASSES - 1, shape, generator=torch.Generator().manual_seed(70 + step))


def later(step: int, first: int) -> Tensor:
    """Which positions count: all of them before step `first`, then other numbers in every sample."""
    mask = torch.ones(SAMPLES, LENGTH, dtype=torch.bool)
    if step >= first:
        for sample in range(SAMPLES):
            mask[sample, LENGTH - (sample + step) % LENGTH :] = False
        mask[:, 0] = True
    return mask


# A. The denominator.


def masked_batch(first: int, kind: torch.dtype) -> Callable[[int], Any]:
    def batch(step: int) -> Any:
        values = random(step, SAMPLES, LENGTH, WIDTH)
        return values, (classes(step, SAMPLES, LENGTH), later(step, first).to(kind))

    return batch


def masked_mean(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    labels, mask = target
    each = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return (each * mask).sum() / mask.sum()


def selected_mean(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    labels, mask = target
    return F.cross_entropy(output[mask.bool()], labels[mask.bool()])


def nan_batch(step: int) -> Any:
    targets = random(step + 50, SAMPLES, LENGTH, CLASSES)
    targets[~later(step, 2)] = torch.nan
    return random(step, SAMPLES, LENGTH, WIDTH), targets


def nan_mean(output: Tensor, targets: Tensor) -> Tensor:
    is_there = ~targets.isnan()
    return (output[is_there] - targets[is_there]).square().mean()


def hidden_batch(ignored: int, first: int) -> Callable[[int], Any]:
    def batch(step: int) -> Any:
        return random(step, SAMPLES, LENGTH, WIDTH), classes(step, SAMPLES, LENGTH).masked_fill(
            ~later(step, first), ignored
        )

    return batch


def ignoring(ignored: int) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=ignored)

    return loss


def weighted_late(step: int) -> Any:
    targets = classes(step, SAMPLES) % 2 + 1
    if step >= 2:
        targets[::3] = CLASSES - 1
    return random(step, SAMPLES, WIDTH), targets


def class_weights(output: Tensor, targets: Tensor) -> Tensor:
    weight = torch.ones(CLASSES, dtype=output.dtype)
    weight[-1] = 9.0
    return F.cross_entropy(output, targets, weight=weight)


def spans(step: int) -> Any:
    starts = classes(step, SAMPLES) % LENGTH
    if step >= 1:
        starts[::3] = LENGTH + 4  # past the end: there is no answer
    return random(step, SAMPLES, LENGTH, WIDTH), starts


def span_mean(output: Tensor, starts: Tensor) -> Tensor:
    scores = output.sum(-1)
    return F.cross_entropy(scores, starts.clamp(max=LENGTH), ignore_index=LENGTH)


# Numbers of another kind: weights, amounts, sizes.


def masked_beside_zeros(step: int) -> Any:
    """The targets have zeros too, in other amounts."""
    labels = classes(step, SAMPLES, LENGTH) % 3
    return random(step, SAMPLES, LENGTH, WIDTH), (labels, later(step, 2).double())


def sample_weights(step: int) -> Any:
    weights = torch.ones(SAMPLES, dtype=torch.float64)
    if step >= 2:
        weights += torch.arange(SAMPLES) / 4
    return random(step, SAMPLES, WIDTH), (random(step + 50, SAMPLES, CLASSES), weights)


def weighted_mean(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    values, weights = target
    return ((output - values).square().mean(1) * weights).sum() / weights.sum()


def late_outliers(size: float) -> Callable[[int], Any]:
    def batch(step: int) -> Any:
        targets = random(step + 50, SAMPLES, LENGTH, CLASSES).clamp(-0.9, 0.9)
        targets[~later(step, 2)] *= size
        return random(step, SAMPLES, LENGTH, WIDTH), targets

    return batch


def inlier_mean(output: Tensor, targets: Tensor) -> Tensor:
    is_inlier = targets.abs() < 1
    return (output[is_inlier] - targets[is_inlier]).square().mean()


def large_inputs(step: int) -> Any:
    return random(step, SAMPLES, WIDTH) * (5 if step >= 2 else 1), random(step + 50, SAMPLES, CLASSES)


class CentresLargeInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = body()

    def forward(self, values: Tensor) -> Tensor:
        return self.body(values - values.mean(0) if bool((values.abs() > 6).any()) else values)


# C. Gradients.


class Centred(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        return gradient - gradient.mean(0, keepdim=True)


class CentresGradients(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return Centred.apply(values)


class StraightThrough(nn.Module):
    """Forward is the identity; its gradient is that of the batch's mean."""

    def forward(self, values: Tensor) -> Tensor:
        mean = values.mean(0, keepdim=True).expand_as(values)
        return values.detach() + mean - mean.detach()


class HookedGradients(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        if values.requires_grad:
            values.register_hook(lambda gradient: gradient / gradient.norm())
        return values


def with_layer(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layers = list(body())
        return nn.Sequential(*layers[:2], layer(), *layers[2:])

    return make


def backward_hooked() -> nn.Module:
    model = body()

    def scale(_: nn.Module, gradients: Any, __: Any) -> Any:
        return tuple(each if each is None else each / each.abs().max() for each in gradients)

    model[2].register_full_backward_hook(scale)
    return model


def vectors(step: int) -> Any:
    return random(step, SAMPLES, WIDTH), classes(step, SAMPLES)


# D. What forwards alone do not show.


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = body()

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        values = values.detach().requires_grad_()
        return self.body(values), values


def gradient_penalty(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    scores, values = output
    (slope,) = torch.autograd.grad(scores.sum(), values, create_graph=True)
    return F.cross_entropy(scores, targets) + slope.square().sum(1).mean()


def batch_penalty(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """Not a mean over samples: the norm is over the batch."""
    scores, values = output
    (slope,) = torch.autograd.grad(scores.sum(), values, create_graph=True)
    return F.cross_entropy(scores, targets) + slope.norm()


def differentiates(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """A backward pass of the loss's own, whose gradients it leaves where they are."""
    scores, _ = output
    (0.1 * scores.abs().mean()).backward(retain_graph=True)
    return F.cross_entropy(scores, targets)


class Equilibrium(nn.Module):
    """A fixed point, whose gradient another fixed point is, found in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.change, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def _next(self, state: Tensor, values: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.change(state) + values)

    def forward(self, values: Tensor) -> Tensor:
        state = torch.zeros_like(values)
        with torch.no_grad():
            for _ in range(20):
                state = self._next(state, values)
        state = self._next(state, values)
        again = state.detach().requires_grad_()
        result = self._next(again, values)

        def solve(gradient: Tensor) -> Tensor:
            solution = gradient
            for _ in range(20):
                (change,) = torch.autograd.grad(result, again, solution, retain_graph=True)
                solution = change + gradient
            return solution

        if state.requires_grad:
            state.register_hook(solve)
        return self.head(state)


class KeepsState(nn.Module):
    """An RNN that goes on where the last call stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.RNNCell(WIDTH, 12), nn.Linear(12, CLASSES)
        self.state: Tensor | None = None

    def forward(self, values: Tensor) -> Tensor:
        self.state = self.cell(values, None if self.state is None else self.state.detach())
        return self.head(self.state)


class NoisyNorm(nn.Module):
    """A batch norm by hand, only in training, beside noise."""

    def __init__(self) -> None:
        super().__init__()
        self.body = body()

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            values = (values - values.mean(0)) / (values.std(0) + 1)
            values = values + 0 * torch.rand(1, dtype=values.dtype)
        return self.body(values)


class DroppedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = body()

    def forward(self, values: Tensor) -> Tensor:
        values = F.dropout(values, 0.0, self.training) + 0 * torch.randn_like(values)
        return self.body(values - values.mean(0) if self.training else values)


# H. A loss on a module.


class Regularised(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.penalty = torch.zeros(())

    def forward(self, values: Tensor) -> Tensor:
        values = self.inner(values)
        self.penalty = values.square().mean()
        return values


def auxiliary(place: int, read: str) -> Foreign:
    """A model of one list of layers; its loss reads what a layer has kept."""
    kept: list[nn.Module] = []

    def make() -> nn.Module:
        layers = list(body())
        layers[place] = Regularised(layers[place])
        kept[:] = [nn.Sequential(*layers)]
        return kept[0]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        (model,) = kept
        penalties = [each.penalty for each in model.modules() if isinstance(each, Regularised)]
        penalty = model[place].penalty if read == "layer" else torch.stack(penalties).sum()
        return F.cross_entropy(output, targets) + penalty

    return Foreign(make, vectors, loss)


DECEPTIVE: dict[str, Foreign] = {
    "mask of floats": Foreign(body, masked_batch(1, torch.float64), masked_mean),
    "mask of floats, third batch": Foreign(body, masked_batch(2, torch.float64), masked_mean),
    "mask of bools": Foreign(body, masked_batch(2, torch.bool), selected_mean),
    "mask of integers": Foreign(body, masked_batch(2, torch.int64), masked_mean),
    "targets of nan": Foreign(body, nan_batch, nan_mean),
    "ignores -100": Foreign(body, hidden_batch(-100, 2), ignoring(-100)),
    "ignores 0": Foreign(body, hidden_batch(0, 2), ignoring(0)),
    "ignores a class": Foreign(body, hidden_batch(CLASSES - 1, 2), ignoring(CLASSES - 1)),
    "weighs a late class": Foreign(body, weighted_late, class_weights),
    "positions past the end": Foreign(body, spans, span_mean),
    "mask beside zeros": Foreign(body, masked_beside_zeros, masked_mean),
    "weights of samples": Foreign(body, sample_weights, weighted_mean),
    "leaves out outliers": Foreign(body, late_outliers(5.0), inlier_mean),
    "leaves out infinity": Foreign(body, late_outliers(torch.inf), inlier_mean),
    "centres large inputs": Foreign(CentresLargeInputs, large_inputs, F.mse_loss),
    "centres gradients": Foreign(with_layer(CentresGradients), vectors, F.cross_entropy),
    "straight-through mean": Foreign(with_layer(StraightThrough), vectors, F.cross_entropy),
    "tensor hook normalises": Foreign(with_layer(HookedGradients), vectors, F.cross_entropy),
    "backward hook normalises": Foreign(backward_hooked, vectors, F.cross_entropy),
    "gradient penalty": Foreign(Penalised, vectors, gradient_penalty),
    "penalty of the batch": Foreign(Penalised, vectors, batch_penalty),
    "a backward pass in the loss": Foreign(Penalised, vectors, differentiates),
    "an equilibrium": Foreign(Equilibrium, vectors, F.cross_entropy),
    "keeps its state": Foreign(KeepsState, vectors, F.cross_entropy),
    "norm beside noise": Foreign(NoisyNorm, vectors, F.cross_entropy),
    "mean beside dropout": Foreign(DroppedNorm, vectors, F.cross_entropy),
    "auxiliary loss of the first layer": auxiliary(0, "layer"),
    "auxiliary loss of the last layer": auxiliary(4, "layer"),
    "auxiliary losses of all modules": auxiliary(2, "all"),
}


def train_deceptive(name: str, plan: str) -> Trained | str:
    """In each rank: most of these cannot be sent there."""
    return engine_training(DECEPTIVE[name], plan)
