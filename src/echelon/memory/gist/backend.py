"""The encodings, in torch operations, or in one Triton kernel each where tensors are on a CUDA device."""

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echelon.memory.gist import floats
from echelon.memory.gist.packing import Layout, flatten, pack, unpack

if TYPE_CHECKING:
    from echelon.memory.gist.functions import Window

_aten = torch.ops.aten


def relu_and_mask(x: Tensor, *, inplace: bool) -> tuple[Tensor, Tensor, Layout]:
    """The output, one bit for each of its elements, and how they lie."""
    kernels = _kernels(x)
    if kernels is not None:
        return kernels.relu_and_mask(x, inplace=inplace)  # type: ignore[no-any-return]
    output = x.relu_() if inplace else x.relu()
    flat, layout = flatten(output)
    return output, pack(~(flat <= 0), 1), layout  # NaN passes gradients


def encoded_relu(x: Tensor, name: str) -> tuple[Tensor, Tensor, Layout, floats.Parts]:
    """The same, and the output in fp16 or fp8."""
    kernels = _kernels(x)
    if kernels is not None:
        return kernels.encoded_relu(x, name)  # type: ignore[no-any-return]
    output, mask, layout = relu_and_mask(x, inplace=False)
    return output, mask, layout, floats.encode(flatten(output)[0], name)


def masked(gradient: Tensor, mask: Tensor, layout: Layout) -> Tensor:
    kernels = _kernels(gradient)
    if kernels is not None and not torch.is_grad_enabled():
        return kernels.masked(gradient, mask, layout)  # type: ignore[no-any-return]
    passes = unpack(mask, 1, layout.size.numel()).to(gradient.dtype)
    # The very operation of torch: its result lies in memory as that of torch does, and so do later sums.
    return _aten.threshold_backward(gradient, layout.shape(passes), 0)  # type: ignore[no-any-return]


def max_pool(x: Tensor, window: "Window") -> tuple[Tensor, Tensor]:
    """The output, and where in its window each element was."""
    kernels, pooling = _kernels(x), _pooling(x)
    if pooling is not None and pooling.suits(x, window):
        return pooling.max_pool(x, window)  # type: ignore[no-any-return]
    output, indices = _aten.max_pool2d_with_indices(x, *window)
    if kernels is not None:
        return output, kernels.window_places(indices, window, x.shape[-1])
    rows, columns = _corners(window, output.shape, x.device)
    row = (torch.div(indices, x.shape[-1], rounding_mode="floor") - rows) // window.dilation[0]
    column = (indices % x.shape[-1] - columns) // window.dilation[1]
    places = (row * window.kernel[1] + column).flatten()
    return output, pack(places, window.bits)


def max_pool_backward(
    gradient: Tensor, places: Tensor, window: "Window", input: Layout, output: torch.Size
) -> Tensor:
    """The gradient of an input that lay so. `output`: the size of the output."""
    like = gradient.new_empty_strided(*input)  # of which torch's backward pass reads only sizes
    pooling = _pooling(gradient)
    if pooling is not None and not torch.is_grad_enabled() and pooling.suits(like, window):
        return pooling.max_pool_backward(gradient, places, window, input.size, output)  # type: ignore[no-any-return]
    indices = window_indices(places, window, output, input.size[-1])
    return _aten.max_pool2d_with_indices_backward(gradient, like, *window, indices)  # type: ignore[no-any-return]


def window_indices(places: Tensor, window: "Window", size: torch.Size, width: int) -> Tensor:
    """Return where in a plane of the input, of this width, each element of an output was."""
    kernels = _kernels(places)
    if kernels is not None:
        return kernels.window_indices(places, window, size, width)  # type: ignore[no-any-return]
    rows, columns = _corners(window, size, places.device)
    codes = unpack(places, window.bits, size.numel()).view(size).long()
    row = rows + torch.div(codes, window.kernel[1], rounding_mode="floor") * window.dilation[0]
    return row * width + columns + codes % window.kernel[1] * window.dilation[1]


def _corners(window: "Window", size: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows and columns of the input in which the windows of an output begin."""
    rows, columns = (
        torch.arange(size[dim], device=device) * window.stride[dim] - window.padding[dim] for dim in (-2, -1)
    )
    return rows[:, None], columns


def encode_floats(dense: Tensor, name: str) -> floats.Parts:
    """The elements of a tensor without gaps, as they lie in memory."""
    kernels = _kernels(dense)
    if kernels is None or name == floats.EXACT:
        return floats.encode(flatten(dense)[0], name)
    return kernels.encode_floats(dense, name)  # type: ignore[no-any-return]


def decode_floats(parts: floats.Parts, name: str, layout: Layout, dtype: torch.dtype) -> Tensor:
    kernels = _kernels(parts[0])
    if kernels is None or name == floats.EXACT:
        return layout.shape(floats.decode(parts, name, layout.size.numel(), dtype))
    return kernels.decode_floats(parts, name, layout, dtype)  # type: ignore[no-any-return]


def _kernels(tensor: Tensor) -> Any:
    return _load() if tensor.is_cuda else None


def _pooling(tensor: Tensor) -> Any:
    return _load_pooling() if tensor.is_cuda else None


@cache
def _load() -> Any:
    """The kernels; None where Triton is not installed."""
    try:
        from echelon.memory.gist import kernels
    except ImportError:
        return None
    return kernels


@cache
def _load_pooling() -> Any:
    try:
        from echelon.memory.gist import pooling
    except ImportError:
        return None
    return pooling
