"""Small trainings that tests share: importable, so that ranks can build them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.verify import Case


class Perceptron(nn.Module):
    """Two layers, a shared weight, a frozen one, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.middle = nn.Linear(12, 12)
        self.again = nn.Linear(12, 12)
        self.again.weight = self.middle.weight
        self.last = nn.Linear(12, 5)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.again(torch.tanh(self.middle(x))))
        return self.last(x) * self.frozen


class Branching(nn.Module):
    """Sends each sample through one of two branches: a replica may use a parameter that others do not."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        to_left = x[:, 0] > 0
        output = x.new_zeros(len(x), 5)
        if to_left.any():
            output[to_left] = self.left(x[to_left])
        if not to_left.all():
            output[~to_left] = self.right(x[~to_left])
        return output


class _Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, only_zeros: bool) -> Tensor:
        ctx.only_zeros = only_zeros
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient if ctx.only_zeros and gradient.any() else None, None


def stop(x: Tensor, *, only_zeros: bool = False) -> Tensor:
    """The same, but no gradient comes back: torch then says None; or that in place of zeros alone."""
    function: Any = _Stop
    result: Tensor = function.apply(x, only_zeros)
    return result


def random_tokens(step: int, shape: tuple[int, int], vocab: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, of which some do not count, but the first of each sample does."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = (torch.randint(vocab, shape, generator=generator) for _ in range(2))
    ignored = torch.rand(targets.shape, generator=generator) < 0.2
    ignored[:, 0] = False
    return inputs, targets.masked_fill(ignored, -100)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def counted_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and count over the targets that are not −100: means over ranks must weigh by the count."""
    return F.cross_entropy(output, target, reduction="sum"), (target != -100).sum()


def vectors(step: int, samples: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(samples, 6, generator=generator), torch.randint(5, (samples,), generator=generator)


def eleven_vectors(step: int) -> tuple[Tensor, Tensor]:
    """A batch that no number of ranks above one divides."""
    return vectors(step, samples=11)


def masked_vectors(step: int) -> tuple[Tensor, Tensor]:
    """Targets of which every step ignores others, more at the front than at the back."""
    inputs, targets = vectors(step)
    generator = torch.Generator().manual_seed(step)
    ignored = torch.rand(len(targets), generator=generator) > torch.linspace(0.2, 0.9, len(targets))
    ignored[step % len(targets)] = False
    return inputs, targets.masked_fill(ignored, -100)


def signed_vectors(step: int) -> tuple[Tensor, Tensor]:
    """The first half has a positive first feature, the second half a negative one."""
    inputs, targets = vectors(step)
    sign = torch.cat([torch.ones(6), -torch.ones(6)])
    inputs[:, 0] = inputs[:, 0].abs() * sign
    return inputs, targets


def perceptron_case(
    make_batch: Callable[[int], Any] = vectors, loss: Callable[[Any, Any], Any] = mean_loss, **changes: Any
) -> Case:
    return Case(Perceptron, make_batch, loss, **({"make_optimizer": adamw} | changes))
