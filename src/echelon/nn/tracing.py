"""Code that torch.compile must not trace, models that it has wrapped, and functions that read no values.

A compiled layer is traced once and replayed. A message would be traced as one of a single rank, and the
number of a step as a constant. An `untraced` function splits the trace: it runs each time.
"""

from collections.abc import Callable
from types import GetSetDescriptorType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
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


# Functions of torch that read no values of a tensor: its shape, type, device, gradient and hooks.


def _functions_without_values() -> set[Callable[..., Any]]:
    """Those of all attributes but tensors of the values."""
    values = {"data", "T", "H", "mT", "mH", "real", "imag"}
    functions: set[Callable[..., Any]] = set()
    for name, attribute in vars(torch._C.TensorBase).items():
        if isinstance(attribute, GetSetDescriptorType) and name not in values:
            functions |= {attribute.__get__, attribute.__set__, attribute.__delete__}
    methods = (
        "dim ndimension size numel nelement stride storage_offset element_size untyped_storage get_device "
        "is_contiguous is_pinned is_floating_point is_complex is_signed is_inference is_conj is_neg _is_view "
        "requires_grad_ "
        "register_hook register_post_accumulate_grad_hook __len__ new_empty new_zeros new_ones new_full"
    )
    functions |= {getattr(Tensor, name) for name in methods.split()}
    makers = "empty_like zeros_like ones_like full_like rand_like randn_like"
    questions = "numel is_floating_point is_complex"
    return functions | {getattr(torch, name) for name in f"{makers} {questions}".split()}


FUNCTIONS_WITHOUT_VALUES = _functions_without_values()
