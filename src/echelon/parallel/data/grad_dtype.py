"""The type of gradients: float32 for weights below that, unless the plan says otherwise.

A sum in bf16 stays where it is as soon as it is 256 times as large as what is added. So the gradient of a
bf16 weight is float32: autograd converts what a backward pass computes, and adds it to a float32 `.grad`
(`Tensor.grad_dtype`). Buffers of gradients are then float32 too, and so is what ranks sum.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

# `Tensor.grad_dtype` of each parameter whose type was set, as it was before. An engine that was not closed
# has set it too: what the next one finds is not the user's.
_original_dtypes: MutableMapping[Tensor, torch.dtype | None] = WeakIdKeyDictionary()


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The type of a parameter's gradient; of a frozen parameter its own."""
    return (parameter.grad_dtype if parameter.requires_grad else None) or parameter.dtype


def weight_dtype(parameter: Tensor) -> torch.dtype:
    return parameter.dtype


def set_gradient_dtype(parameter: nn.Parameter, *, in_float32: bool) -> None:
    """Let gradients of the parameter be of its own type, or `in_float32` if that is more, until
    `restore_gradient_dtype`.

    A gradient of before that is of another type is dropped: torch would refuse to add to it.
    """
    is_low = parameter.is_floating_point() and parameter.dtype.itemsize < torch.float32.itemsize
    dtype = torch.float32 if in_float32 and is_low else parameter.dtype
    if gradient_dtype(parameter) != dtype:
        _original_dtypes.setdefault(parameter, _setting(parameter, parameter.grad_dtype))
        _change(parameter, _setting(parameter, dtype))


def restore_gradient_dtype(parameter: nn.Parameter) -> None:
    """Let gradients of the parameter be of the type that was theirs before `set_gradient_dtype`."""
    if parameter in _original_dtypes:
        _change(parameter, _original_dtypes.pop(parameter))


def _setting(parameter: nn.Parameter, dtype: torch.dtype | None) -> torch.dtype | None:
    """What to set for gradients of `dtype`: the parameter's own type, once set, would outlast a conversion.
    None is: as computed."""
    return None if dtype == parameter.dtype else dtype


def _change(parameter: nn.Parameter, setting: torch.dtype | None) -> None:
    parameter.grad = None
    parameter.grad_dtype = setting


@contextmanager
def without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Set the gradients of these parameters aside: torch.compile leaves a layer alone, which it is to record,
    while one of its weights has a gradient of another type."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
