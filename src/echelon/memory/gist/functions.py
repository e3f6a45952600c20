"""ReLU and pooling that save only what their backward passes need.

    torch                               here
    relu         its output             1 bit per element: whether the gradient passes
    max_pool2d   its input and places   4 bits per output: where in its window (8, if the window is large)
    avg_pool2d   its input              nothing

Their backward passes are those of torch, on the same numbers: gradients are the same to the last bit.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.memory.gist import backend
from echelon.memory.gist.compression import Compression, Maker, is_encoded, is_off
from echelon.memory.gist.floats import Parts, format_for
from echelon.memory.gist.packing import Layout
from echelon.nn.wrapping import Wrapper, replaced_forward

_aten = torch.ops.aten
_LARGEST_WINDOW = 256


def relu(x: Tensor, compression: Compression, *, inplace: bool = False, maker: Maker | None = None) -> Tensor:
    """As F.relu. `maker`: of whom it is known whether outputs are saved."""
    if not _applies(x) or (inplace and (x.is_leaf or x._base is not None)):
        return F.relu(x, inplace)
    name = None
    if maker is not None and not inplace and compression.format is not None:
        name = format_for(x.dtype, compression.format)
        name = name if name in ("fp16", "fp8") else None  # which a ReLU can write along with its output
    encoding = _Encoding(name) if name is not None and maker is not None and maker.is_read else None
    function: Any = _ReLU
    output: Tensor = function.apply(x, inplace, encoding)
    compression.found.add("relu")
    if name is not None and maker is not None:
        compression.fresh.show(output, maker, None if encoding is None else encoding.parts)
    elif compression.format is None and not x.is_cuda:
        compression.marks.mark(output)  # others do not ask
    return output


class _Encoding:
    """The encoding that a ReLU writes along with its output."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.parts: Parts = ()


class Window(NamedTuple):
    """The window of a max_pool2d; each field as (height, width)."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    ceil_mode: bool

    @classmethod
    def of(
        cls,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> "Window":
        stride = stride if stride is not None and stride != () else kernel_size
        return cls(_pair(kernel_size), _pair(stride), _pair(padding), _pair(dilation), ceil_mode)

    @property
    def bits(self) -> int:
        return 4 if self.kernel[0] * self.kernel[1] <= 16 else 8

    def output_size(self, size: torch.Size) -> torch.Size:
        """Return the size of the output for an input of this size, by torch's rule."""
        return torch.Size((*size[:-2], *(self._num_windows(size[dim], dim) for dim in (-2, -1))))

    def _num_windows(self, length: int, dim: int) -> int:
        kernel, stride, padding, dilation = (each[dim] for each in self[:4])
        room = length + 2 * padding - dilation * (kernel - 1) - 1
        num = (room + (stride - 1 if self.ceil_mode else 0)) // stride + 1
        # No window begins behind the input.
        return num - (self.ceil_mode and (num - 1) * stride >= length + padding)


def max_pool2d(x: Tensor, window: Window, compression: Compression) -> Tensor:
    if not _applies(x) or window.kernel[0] * window.kernel[1] > _LARGEST_WINDOW:
        return F.max_pool2d(x, *window[:4], ceil_mode=window.ceil_mode)
    has_zeros = compression.format is None and not x.is_cuda and compression.marks.has(x)
    function: Any = _MaxPool
    output: Tensor = function.apply(x, window)
    compression.found.add("max_pool2d")
    if has_zeros:
        compression.marks.mark(output)
    return output


def avg_pool2d(x: Tensor, module: nn.AvgPool2d, compression: Compression) -> Tensor:
    settings = [
        _pair(module.kernel_size),
        _pair(module.stride),
        _pair(module.padding),
        module.ceil_mode,
        module.count_include_pad,
        module.divisor_override,
    ]
    if not _applies(x):
        return _aten.avg_pool2d(x, *settings)  # type: ignore[no-any-return]
    function: Any = _AvgPool
    output: Tensor = function.apply(x, settings)
    compression.found.add("avg_pool2d")
    return output


def _applies(x: Tensor) -> bool:
    """Return whether autograd would save something that is large."""
    return x.requires_grad and torch.is_grad_enabled() and not is_off() and is_encoded(x)


def _pair(value: Any) -> Any:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * 2 if len(numbers) == 1 else numbers


class _ReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool, encoding: _Encoding | None) -> Tensor:
        if encoding is not None:
            output, mask, ctx.layout, encoding.parts = backend.encoded_relu(x, encoding.name)
        else:
            output, mask, ctx.layout = backend.relu_and_mask(x, inplace=inplace)
        if inplace:
            ctx.mark_dirty(x)
        ctx.save_for_backward(mask)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return backend.masked(gradient, mask, ctx.layout), None, None


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window) -> Tensor:
        output, places = backend.max_pool(x, window)
        ctx.window, ctx.input, ctx.output_size = window, Layout(x.size(), x.stride()), output.size()
        ctx.save_for_backward(places)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return backend.max_pool_backward(gradient, places, ctx.window, ctx.input, ctx.output_size), None


class _AvgPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: list[Any]) -> Tensor:
        ctx.input, ctx.settings = Layout(x.size(), x.stride()), settings
        return _aten.avg_pool2d(x, *settings)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input = gradient.new_empty_strided(*ctx.input)
        return _aten.avg_pool2d_backward(gradient, input, *ctx.settings), None


class CompressedModule(Wrapper, Maker):
    """A ReLU or a pool, in place of its forward. A copy of a model is called as if it were not there."""

    entry = "compress"

    def __init__(self, module: nn.Module, compression: Compression) -> None:
        super().__init__(module)
        self._compression: Compression | None = compression

    def __call__(self, input: Tensor) -> Tensor:
        module, compression = self.module, self._compression
        if compression is None:
            output: Tensor = self.inner(input)
            return output
        if isinstance(module, nn.ReLU):
            return relu(input, compression, inplace=module.inplace, maker=self)
        if isinstance(module, nn.AvgPool2d):
            return avg_pool2d(input, module, compression)
        assert isinstance(module, nn.MaxPool2d)
        window = Window.of(
            module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode
        )
        return max_pool2d(input, window, compression)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_compression": None}


def can_compress(module: nn.Module) -> bool:
    """Return whether it is called as torch's own."""
    kind = next((kind for kind in (nn.ReLU, nn.MaxPool2d, nn.AvgPool2d) if isinstance(module, kind)), None)
    if kind is None or type(module).forward is not kind.forward or replaced_forward(module) is not None:
        return False
    return not (isinstance(module, nn.MaxPool2d) and module.return_indices)
