"""Code that torch.compile must not trace, and models that it has wrapped.

A compiled layer is traced once and replayed. A message would be traced as one of a single rank, and the
number of a step as a constant. An `untraced` function splits the trace: it runs each time.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from echelon.nn.wrapping import Wrapping

P = ParamSpec("P")
T = TypeVar("T")


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Keep torch.compile out of a function. torch.compiler.disable would import the compiler at once."""
    return _disable_dynamo(function)


def without_compiling(model: nn.Module, wrapping: Wrapping) -> nn.Module:
    """Return the model inside of what torch.compile made of it, with no module compiled until `wrapping` is
    removed.

    A plan changes how modules are called, and names are those of the model itself. `compile=true` in a plan
    compiles the result.
    """
    model = _original(model)
    for module in list(model.modules()):
        if module._compiled_call_impl is not None:  # model.compile()
            wrapping.assign(module, "_compiled_call_impl", None)
        for name, child in list(module._modules.items()):
            if child is not None and _original(child) is not child:
                wrapping.assign(module, name, _original(child))
    return model


def _original(module: nn.Module) -> nn.Module:
    while isinstance(inner := module._modules.get("_orig_mod"), nn.Module):
        module = inner
    return module


def is_transformed() -> bool:
    """Return whether a tracer records what is computed, or a transform differentiates it in another way."""
    recorded = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    return recorded or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
