"""Float64 all the way: what transformers computes in float32, whatever the type of the model.

Its norms, its routers, the softmax of its "eager" attention and the scan of Mamba cast down. Their rounding
would be that of float32, which changes as soon as a loss is divided by another count, and could hide a
mistake.
"""

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from echelon.nn.huggingface import casts_to_float32
from echelon.nn.inputs import tensors_of
from echelon.nn.wrapping import Wrapper, Wrapping

_CONVERSIONS = (Tensor.float, Tensor.to, Tensor.type)


def patch_float64(model: nn.Module) -> None:
    """Keep modules of transformers in float64 where they would cast down to float32."""
    wrapping = Wrapping()
    for module in model.modules():
        if casts_to_float32(module):
            wrapping.wrap(_Float64Forward(module))


@final
class _Float64Forward(Wrapper):
    entry = "float64"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with Float64():
            return self.inner(*args, **kwargs)


class Float64(TorchFunctionMode):
    """Inside, a function of a float64 tensor that asks for float32 gets float64, and so does the conversion
    of integers, as of positions that are multiplied with frequencies."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = (args, kwargs or {})
        tensors = tensors_of(arguments)
        converts_integers = func in _CONVERSIONS and not tensors[0].is_floating_point()
        if converts_integers or any(tensor.dtype == torch.float64 for tensor in tensors):
            func = Tensor.double if func is Tensor.float else func
            arguments = tree_map(lambda leaf: torch.float64 if leaf is torch.float32 else leaf, arguments)
        args, kwargs = arguments
        return func(*args, **kwargs)
