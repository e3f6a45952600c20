"""Parameters in parts, without ranks: each part is a tensor of its own, in one process."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from echelon.state.ownership import own_run, run_slices
from echelon.update.optim.sum_optimizer import Exchange, Part, SumOptimizer


class InParts:
    """An optimizer over runs of parameters, cut at `cuts`: all that ranks would have, in one place."""

    def __init__(self, kind: Any, parameters: Sequence[Tensor], cuts: Sequence[int], **options: Any) -> None:
        self.runs: list[list[nn.Parameter]] = []
        parts: dict[Tensor, Part] = {}
        for number, parameter in enumerate(parameters):
            ends = sorted({0, parameter.numel(), *(cut for cut in cuts if cut < parameter.numel())})
            flat = parameter.detach().flatten()
            self.runs.append([])
            for begin, end in pairwise(ends):
                run = nn.Parameter(flat[begin:end].clone())
                self.runs[-1].append(run)
                parts[run] = part_of(run, number, tuple(parameter.shape), begin)
        shapes = [tuple(parameter.shape) for parameter in parameters]
        self.optimizer: SumOptimizer = kind([run for runs in self.runs for run in runs], **options)
        self.optimizer.share(Exchange(shapes, parts, (), torch.float64, torch.device("cpu")))

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        for runs, gradient in zip(self.runs, gradients, strict=True):
            pieces = None if gradient is None else gradient.flatten().split([run.numel() for run in runs])
            for index, run in enumerate(runs):
                run.grad = None if pieces is None else pieces[index].clone()
        self.optimizer.step()

    def values(self) -> list[Tensor]:
        return [torch.cat([run.detach() for run in runs]) for runs in self.runs]


def part_of(run: nn.Parameter, number: int, shape: tuple[int, ...], begin: int) -> Part:
    slices = run_slices("p", shape, begin, begin + run.numel())

    def views(tensor: Tensor) -> list[Tensor]:
        return [owned.tensor for owned in own_run(tensor, slices)]

    return Part(number, [each.box for each in slices], views)


def random_parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float64) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def random_gradients(parameters: Sequence[Tensor], step: int) -> list[Tensor | None]:
    """Each parameter is left out in every fifth step."""
    generator = torch.Generator().manual_seed(100 + step)
    drawn = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    return [None if (step + index) % 5 == 0 else gradient for index, gradient in enumerate(drawn)]


def set_gradients(parameters: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What the state of a 1024 × 1024 matrix takes after an update."""
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


def worst(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    pairs = zip(first, second, strict=True)
    return max(float((one.flatten() - other.flatten()).detach().abs().max()) for one, other in pairs)
