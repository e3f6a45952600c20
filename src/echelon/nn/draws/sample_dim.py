"""The numbers of one draw: a hash of each element's place in the tensor that one device would draw.

    one device     4 samples of 3 elements     0 1 2 │ 3 4 5 │ 6 7 8 │ 9 10 11
    a microbatch   samples 2 and 3                             6 7 8 │ 9 10 11

Numbers that do not belong to samples are the same in every microbatch: places begin at 0.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from types import FrameType
from typing import NamedTuple, final

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from echelon.nn.dropout.training_position import TrainingPosition
from echelon.nn.hashing import WEYL, hash_of, mix_, moved, signed, signed_key
from echelon.nn.wrapping import Wrapper

_MOST_HASHES = 1 << 22  # computed at a time: bounds the memory beside the result
_PACKAGE = str(Path(__file__).parents[2])
_HERE = str(Path(__file__).parent)
_CHECKPOINT = torch.utils.checkpoint.__file__

# Of a draw: where it is, its key, and the module that draws.
Key = tuple[TrainingPosition, int | Tensor, nn.Module | None]


class SampleDim(NamedTuple):
    """The dim of a tensor that counts samples, the first of which has this number in the global batch. The
    dim may have several rows of each sample, those of a sample one after the other."""

    dim: int
    samples: int
    first_sample: int | Tensor


@torch.no_grad()
def uniform(
    key: int | Tensor, shape: tuple[int, ...], device: torch.device, sample_dim: SampleDim | None = None
) -> Tensor:
    """Draw numbers of (0, 1) in float64: odd multiples of 2⁻⁵³."""
    if sample_dim is None:
        return _uniform(key, prod(shape), 0, device).view(shape)
    dim, samples, first = sample_dim
    numbers = _uniform(key, prod(shape), first * (prod(shape) // samples), device)
    return numbers.view(shape[dim], *shape[:dim], *shape[dim + 1 :]).movedim(0, dim)


def _uniform(key: int | Tensor, number: int, begin: int | Tensor, device: torch.device) -> Tensor:
    drawn = torch.empty(number, dtype=torch.float64, device=device)
    key, begin = moved(signed_key(key), device), moved(begin, device)
    for left in range(0, number, _MOST_HASHES):
        part = drawn[left : left + _MOST_HASHES]
        places = torch.arange(left, left + len(part), device=device).add_(begin)
        hashes = mix_(places.mul_(signed(WEYL)).add_(key))
        part.copy_((hashes >> 12).bitwise_and_((1 << 52) - 1)).add_(0.5).mul_(2.0**-52)
    return drawn


@final
class Source:
    """The random numbers of one call of a function of torch."""

    def __init__(self, next_key: Callable[[Sequence[int]], Key]) -> None:
        self._next_key = next_key

    def uniform(
        self, shape: Sequence[int], device: torch.device, like: Tensor | None, *, shared: bool = False
    ) -> Tensor:
        """Draw from (0, 1), in float64. `like`: the tensor that they are for; `shared`: by all samples."""
        shape = tuple(shape)
        position, key, module = self._next_key(shape)
        dim = None if shared else find_dim(shape, position.samples, like, module)
        sample_dim = None if dim is None else SampleDim(dim, position.samples, position.first_sample)
        return uniform(key, shape, device, sample_dim)

    def by_generator(self, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """Call the function for each sample, with a generator of its own."""
        tensors = torch.broadcast_tensors(*args)
        shape = tuple(tensors[0].shape)
        position, on_device, module = self._next_key(shape)
        key = int(on_device)
        generator = torch.Generator(args[0].device)
        dim = find_dim(shape, position.samples, args[0], module)
        if dim is None:
            return function(*tensors, generator=generator.manual_seed(key))
        first = int(position.first_sample)
        split = zip(*(each.split(shape[dim] // position.samples, dim) for each in tensors), strict=True)
        parts = [
            function(*part, generator=generator.manual_seed(hash_of(first + number, start=key)))
            for number, part in enumerate(split)
        ]
        return torch.cat(parts, dim)


def find_dim(
    shape: tuple[int, ...], samples: int, like: Tensor | None, module: nn.Module | None
) -> int | None:
    """Return the dim that counts samples; None where one device draws the tensor once for all of them.

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
    """Find the innermost of these modules that is being called; None in a loss function.

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
        elif code.co_filename.startswith(_PACKAGE) and not (
            code.co_filename.startswith(_HERE) or isinstance(first, TorchFunctionMode)
        ):
            return None  # the engine, which a module of another model may call
        frame = frame.f_back
    return None


def is_checkpointed() -> bool:
    """Return True if the code that runs now runs again in the backward pass, where torch draws."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT:
        frame = frame.f_back
    return frame is not None
