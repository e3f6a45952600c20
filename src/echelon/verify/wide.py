"""Float64 all the way: what transformers computes in float32 whatever the type of its model.

Its norms, its routers and the softmax of its "eager" attention cast down. There rounding would be that of
float32, which differs as soon as a loss is divided by another count, and could hide a mistake.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map


def widen(model: nn.Module) -> None:
    """Let modules of transformers that cast float64 down to float32 stay in float64."""
    for module in model.modules():
        if type(module).__module__.startswith("transformers.") and _casts_down(module):
            module.forward = _Wide(module)


def _casts_down(module: nn.Module) -> bool:
    return type(module).__name__.endswith(("RMSNorm", "Router")) or hasattr(module, "num_key_value_groups")


class _Wide:
    """The forward of one module. No closure, so that the model can be copied and pickled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Float64():
            return type(self.module).forward(self.module, *args, **kwargs)


class _Float64(TorchFunctionMode):
    """Inside, what is asked for in float32 of a float64 tensor is given in float64."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        if any(isinstance(leaf, Tensor) and leaf.dtype == torch.float64 for leaf in tree_leaves(given)):
            func = Tensor.double if func is Tensor.float else func
            given = tree_map(lambda leaf: torch.float64 if leaf is torch.float32 else leaf, given)
        args, kwargs = given
        return func(*args, **kwargs)
