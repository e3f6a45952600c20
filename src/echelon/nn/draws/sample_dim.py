"""Which dim of a drawn tensor counts samples, and which module draws it."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from echelon.nn.wrapping import Wrapper

_PACKAGE = str(Path(__file__).parents[2])
_HERE = str(Path(__file__).parent)
_CHECKPOINT = torch.utils.checkpoint.__file__


def find_dim(
    shape: tuple[int, ...], samples: int, like: Tensor | None, module: nn.Module | None
) -> int | None:
    """None where a tensor of this shape has no samples: one device draws it once for all of them.

    find_dim((4, 3), 4, …) == 0         find_dim((10, 4, 3), 4, …) == 1       10 draws for each, or positions
    find_dim((20, 3), 4, …) == 0        5 rows of each sample                 find_dim((1, 4), 4, …) is None
    find_dim((8, 4, 4), 4, …) == 0      an attention's weights, 2 heads of each

    `like`: the tensor that is written, dropped or copied in shape. What is drawn for a weight is no matter
    of samples: `like` is one, or the shape is that of a weight of the module that draws.
    """
    weights = [] if module is None else list(module.parameters(recurse=False))
    if not shape or samples == 0 or _is_weight(like, weights) or any(shape == w.shape for w in weights):
        return None
    if shape[0] == samples:
        return 0
    if shape[0] == 1:
        return None
    if shape.count(samples) == 1 or (samples in shape and shape[0] % samples):
        return shape.index(samples)
    of_weight = like is None and any(shape[0] in weight.shape for weight in weights)
    return None if shape[0] % samples or of_weight else 0


def _is_weight(tensor: Tensor | None, weights: list[nn.Parameter]) -> bool:
    if tensor is None or isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return tensor is not None
    # Also `weight.data`, and the weight of a module that is called with it gathered.
    return tensor.layout is torch.strided and any(
        weight.numel() and weight.data_ptr() == tensor.data_ptr() for weight in weights
    )


def drawing_module(names: Mapping[nn.Module, str]) -> nn.Module | None:
    """The innermost of these modules that is being called; None in a loss function.

    It is the first argument of a function that is running: of `forward`, of another method, of a hook. Only a
    draw has to know it, so modules are called as ever.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        module = first.module if isinstance(first, Wrapper) else first
        if isinstance(module, nn.Module):
            if module in names:
                return module
        elif code.co_filename.startswith(_PACKAGE) and not code.co_filename.startswith(_HERE):
            return None  # the engine, which may be called by a module of somebody else
        frame = frame.f_back
    return None


def is_checkpointed() -> bool:
    """Whether the code that runs now runs again in the backward pass, where torch's generators draw."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT:
        frame = frame.f_back
    return frame is not None
