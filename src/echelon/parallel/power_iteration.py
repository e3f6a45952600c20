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
        if isinstance(each, _SpectralNorm) or _hooks(each):
            found.append(each)
    return found


@contextmanager
def no_iteration(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Estimates stay as they are inside. A layer with a hook goes on to drop out."""
    training = [module for module in modules if isinstance(module, _SpectralNorm) and module.training]
    hooks = {hook: hook.n_power_iterations for module in modules for hook in _hooks(module)}
    for module in training:
        module.training = False
    for hook in hooks:
        hook.n_power_iterations = 0
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for hook, number in hooks.items():
            hook.n_power_iterations = number


def _hooks(module: nn.Module) -> list[SpectralNorm]:
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
