"""Spectral norms, which improve an estimate in every forward pass: once per step, however the batch is cut.

On one device a step is one forward pass, and iterates once. Where it has several, one for each microbatch,
only the first iterates, and all of them use the weight of the same estimate.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm


def iterated_modules(module: nn.Module, *, recurse: bool = True) -> list[nn.Module]:
    """The modules that iterate in the forward of `module` while they are in training mode."""
    found = []
    for each in module.modules() if recurse else [module]:
        by_hook = any(isinstance(hook, SpectralNorm) for hook in each._forward_pre_hooks.values())
        if isinstance(each, _SpectralNorm) or by_hook:
            found.append(each)
    return found


@contextmanager
def no_iteration(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Estimates stay as they are inside."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
