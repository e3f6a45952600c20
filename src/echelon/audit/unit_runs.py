"""Runs of a unit: all of them with the same masks and random numbers, and the gradients of what comes out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from echelon.audit.arguments import Arguments
from echelon.audit.units import AuditUnit
from echelon.dropout import scope
from echelon.generators import GeneratorStates
from echelon.pipeline_parallel import StageModule

_SEED = 15

Modes = Mapping[nn.Module, bool]  # whether each module trains


class Run(NamedTuple):
    """The real numbers that came out; `has_drawn`: generators of random numbers were used."""

    outputs: list[Tensor]
    has_drawn: bool


def run(call: Callable[..., Any], arguments: Arguments, modules: Sequence[nn.Module]) -> Run:
    """`modules`: those that are called, which may have generators of their own."""
    torch.manual_seed(_SEED)
    inside = [each for module in modules for each in module.modules()]
    before = GeneratorStates(torch.device("cuda" if torch.cuda.is_available() else "cpu"), inside)
    with scope(seed=_SEED, step=0, first_sample=0):
        output = call(*arguments.args, **arguments.kwargs)
    return Run([leaf for leaf in tree_leaves(output) if is_real(leaf)], before.moved())


def is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def draw_gradient(output: Tensor, number: int) -> Tensor:
    """A gradient of output `number`, the same on every rank."""
    generator = torch.Generator(output.device).manual_seed(_SEED + number)
    return torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)


def gradients_of(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], of_outputs: Sequence[Tensor]
) -> list[Tensor]:
    """Added to nothing: they are returned alone, as before hooks on them. No gradient is one of zeros."""
    zeros = [torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in inputs]
    pairs = [pair for pair in zip(outputs, of_outputs, strict=True) if pair[0].requires_grad]
    if not pairs or not inputs:
        return zeros
    used, given = zip(*pairs, strict=True)
    with _without_hooks(inputs):
        gradients = torch.autograd.grad(used, inputs, given, allow_unused=True)
    return [zero if gradient is None else gradient for gradient, zero in zip(gradients, zeros, strict=True)]


@contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Hooks of the user's are for gradients of training, and only one of two weights would have them."""
    hooks = {tensor: tensor._backward_hooks for tensor in tensors if tensor._backward_hooks}
    for tensor in hooks:
        tensor._backward_hooks = None
    try:
        yield
    finally:
        for tensor, own in hooks.items():
            tensor._backward_hooks = own


@contextmanager
def in_modes(unit: AuditUnit, modes: Modes, *, training: bool) -> Iterator[None]:
    """Inside, the unit and its originals are in these modes; or evaluate, unless `training`.

    Norms over a batch always do: replicas that train put their statistics together.
    """
    chosen: dict[nn.Module, bool] = {}
    for module, original in zip(_parts_of(unit.module), unit.originals, strict=True):
        own, copies = list(module.modules()), list(original.modules())
        chosen |= {inside: training and modes[inside] for inside in own}
        is_alike = len(own) == len(copies)
        chosen |= {copy: chosen[own[number]] if is_alike else training for number, copy in enumerate(copies)}
    chosen |= {module: False for module in chosen if isinstance(module, _BatchNorm)}
    before = {module: module.training for module in chosen}
    _set(chosen)
    try:
        yield
    finally:
        _set(before)


def _parts_of(module: nn.Module) -> list[nn.Module]:
    return module.layers() if isinstance(module, StageModule) else [module]


def _set(modes: Modes) -> None:
    for module, training in modes.items():
        module.training = training
