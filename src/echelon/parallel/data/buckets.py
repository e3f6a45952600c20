"""Memory of gradients: its type, where it comes from, and buckets, which are reduced at once.

Buckets. A step's first gradient of a parameter moves to the parameter's view of a contiguous buffer, which
from then on is its `.grad`: further microbatches add where the sum is reduced, and nothing is copied out. (To
zero the buffer and have autograd add the first gradient too would move twice the memory.) Buckets are filled
in the order in which gradients are expected.

Types. A sum in bf16 stays where it is as soon as it is 256 times as large as what is added. So gradients of a
bf16 weight are summed in float32 (`gradient_dtype`), over microbatches and ranks, and buffers of gradients
are float32 too. Autograd converts what a backward pass computes (`Tensor.grad_dtype`): one kernel for each
weight. Where a pass computes one product and no sum, there is no need (`keep_products`): the product stays
bf16 until it is copied into a float32 buffer, or until another one is added, which takes one kernel either
way. A gradient to which nothing is added stays as it is.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from echelon.collectives.buffer_layout import BufferLayout, block_size, lay_out, portions

# `Tensor.grad_dtype` of each parameter whose type was set, as it was before. An engine that was not closed
# has set it too: what the next one finds is not the user's.
_original_dtypes: MutableMapping[Tensor, torch.dtype | None] = WeakIdKeyDictionary()

# The type that gradients are summed in, of parameters whose `.grad` is as computed until then.
_sum_dtypes: MutableMapping[Tensor, torch.dtype] = WeakIdKeyDictionary()


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The type that a parameter's gradients are summed in; of a frozen parameter its own."""
    setting = parameter.grad_dtype if parameter.requires_grad else None
    return _sum_dtypes.get(parameter) or setting or parameter.dtype


def weight_dtype(parameter: Tensor) -> torch.dtype:
    return parameter.dtype


def set_gradient_dtype(parameter: nn.Parameter, *, in_float32: bool) -> None:
    """Let gradients of the parameter be of its own type, or `in_float32` if that is more, until
    `restore_gradient_dtype`.

    A gradient of before that is of another type is dropped: torch would refuse to add to it.
    """
    convert_products([parameter])
    is_low = parameter.is_floating_point() and parameter.dtype.itemsize < torch.float32.itemsize
    dtype = torch.float32 if in_float32 and is_low else parameter.dtype
    if gradient_dtype(parameter) != dtype:
        _original_dtypes.setdefault(parameter, _setting(parameter, parameter.grad_dtype))
        _change(parameter, _setting(parameter, dtype))


def restore_gradient_dtype(parameter: nn.Parameter) -> None:
    """Let gradients of the parameter be of the type that was theirs before `set_gradient_dtype`."""
    _sum_dtypes.pop(parameter, None)
    if parameter in _original_dtypes:
        _change(parameter, _original_dtypes.pop(parameter))


def _setting(parameter: nn.Parameter, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the `grad_dtype` for gradients of `dtype`: None (as computed) for the parameter's own type,
    which, once set, would outlast a conversion of the parameter."""
    return None if dtype == parameter.dtype else dtype


def _change(parameter: nn.Parameter, setting: torch.dtype | None) -> None:
    parameter.grad = None
    parameter.grad_dtype = setting


def keep_products(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Leave gradients as backward passes compute them, of those parameters that sum in another type; returns
    these. What is added to such a gradient must find it converted (`convert_gradients`)."""
    kept = [parameter for parameter in parameters if gradient_dtype(parameter) != parameter.dtype]
    with torch._C.DisableTorchFunctionSubclass():  # a freed parameter need not be gathered for this
        for parameter in kept:
            _sum_dtypes[parameter] = gradient_dtype(parameter)
            parameter.grad_dtype = None
    return kept


def convert_products(parameters: Iterable[nn.Parameter]) -> None:
    """Undo `keep_products`: autograd converts each product before it adds it to another."""
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters:
            dtype = _sum_dtypes.pop(parameter, None)
            if dtype is not None:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to(dtype)
                parameter.grad_dtype = dtype


def convert_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Make gradients that are there, and to which a backward pass may add, of the type that they sum in."""
    low = [p for p in parameters if p.grad is not None and p.grad.dtype == p.dtype]
    for parameter in low:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.to(gradient_dtype(parameter))


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


# Memory for gradients of units (zero 2 and 3): new for each, or preallocated.
#
# Preallocated (contiguous=true, ZeRO's MD): every buffer is as large as the largest that is ever asked for,
# so any buffer serves any unit, and steps take no new memory between the activations of a backward pass. One
# gradient is produced while another is summed; where more are open at a time, more buffers are made, and
# stay.
#
#     take(100)   buffer 0 [:100]
#     take(80)    buffer 1 [:80]          free: none
#     give_back(buffer 0)                 free: buffer 0, when the sum that read it has been waited for

_AT_ONCE = 2  # one is produced, one is summed


class GradientKind(NamedTuple):
    """Gradients that can lie in the same memory."""

    dtype: torch.dtype
    device: torch.device


class GradientMemory(ABC):
    """The memory of gradients until they are summed."""

    @abstractmethod
    def take(self, size: int, kind: GradientKind) -> Tensor:
        """Memory for `size` elements, with any values."""

    @abstractmethod
    def give_back(self, memory: Tensor) -> None:
        """Nothing that was issued before needs the values any more, or has not been waited for."""

    def storages(self) -> list[Tensor]:
        """Return the buffers that are held while no gradient is there."""
        return []


@final
class NewMemory(GradientMemory):
    def take(self, size: int, kind: GradientKind) -> Tensor:
        return torch.empty(size, dtype=kind.dtype, device=kind.device)

    def give_back(self, memory: Tensor) -> None:
        pass


@final
class PreallocatedMemory(GradientMemory):
    """Buffers of the largest size."""

    def __init__(self, sizes: Iterable[tuple[int, GradientKind]], at_once: int = _AT_ONCE) -> None:
        """`sizes`: of every gradient that will ask; `at_once`: how many buffers are made now."""
        self._largest: Counter[GradientKind] = Counter()
        for size, kind in sizes:
            self._largest[kind] = max(self._largest[kind], size)
        self._buffers = {kind: [self._make(kind) for _ in range(at_once)] for kind in self._largest}
        self._free = {kind: list(buffers) for kind, buffers in self._buffers.items()}

    def _make(self, kind: GradientKind) -> Tensor:
        return torch.empty(self._largest[kind], dtype=kind.dtype, device=kind.device)

    def take(self, size: int, kind: GradientKind) -> Tensor:
        assert size <= self._largest[kind]
        if not self._free[kind]:
            self._free[kind].append(self._make(kind))
            self._buffers[kind] += self._free[kind]
        return self._free[kind].pop()[:size]

    def give_back(self, memory: Tensor) -> None:
        kind = GradientKind(memory.dtype, memory.device)
        # By address: what is given back is a view of the buffer, of one unit's size.
        buffer = next(each for each in self._buffers[kind] if each.data_ptr() == memory.data_ptr())
        assert all(each is not buffer for each in self._free[kind]), "given back twice"
        self._free[kind].append(buffer)

    def storages(self) -> list[Tensor]:
        return [buffer for buffers in self._buffers.values() for buffer in buffers]


class Bucket:
    """A buffer, and for each parameter the view that is its gradient; what lies between views is zeros."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        layout: BufferLayout | None = None,
        memory: GradientMemory | None = None,
    ) -> None:
        self._layout = layout or lay_out((p.numel() for p in parameters), block_size(dtype))
        kind = GradientKind(dtype, parameters[0].device)
        self.buffer = (memory or NewMemory()).take(self._layout.size, kind)
        # New memory holds anything: a not-a-number between two views would reach the norm of the buffer.
        for begin, end in self._layout.gaps():
            self.buffer[begin:end].zero_()
        self.views = self._cut(parameters)

    def _cut(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        return {
            parameter: self.buffer[begin:end].view(parameter.shape)
            for parameter, (begin, end) in zip(parameters, self._layout.places, strict=True)
        }

    def reallocate(self) -> None:
        """Move to new memory; views of the old keep that."""
        self.buffer = self.buffer.clone()
        self.views = self._cut(self.views)

    def open(self) -> None:
        for parameter in self.views:
            parameter.grad = None

    def accumulate(self, parameter: nn.Parameter) -> None:
        """A parameter has got a gradient: where it is not in the buffer already, it moves there."""
        view = self.views[parameter]
        if parameter.grad is not view:
            assert parameter.grad is not None
            put(view, parameter.grad.detach())
            parameter.grad = view

    def close(self) -> Tensor:
        """The buffer, complete: parameters without a gradient have zeros there."""
        for parameter, view in self.views.items():
            if parameter.grad is not view:
                view.zero_()
                parameter.grad = view
        return self.buffer


class UnitBucket:
    """The gradients of one unit, all of one type, in a bucket that takes memory when the first one comes."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, layout: BufferLayout | None = None
    ) -> None:
        self.parameters = list(parameters)
        self._dtype, self._layout = dtype, layout
        self._memory: GradientMemory = NewMemory()
        self._bucket: Bucket | None = None

    @property
    def buffer(self) -> Tensor | None:
        return None if self._bucket is None else self._bucket.buffer

    def accumulate(self, parameter: nn.Parameter) -> None:
        """A parameter has got a gradient: it moves to its place in the buffer."""
        self._allocated().accumulate(parameter)

    def open(self) -> None:
        """Forget all gradients, but keep their memory."""
        self._allocated().open()

    def close(self) -> Tensor:
        return self._allocated().close()

    def take(self) -> Tensor:
        """The whole gradient, complete, which the parameters let go of. The caller gives its memory back."""
        gradient = self.close()
        self._bucket = None
        self._clear()
        return gradient

    def free(self) -> None:
        if self._bucket is not None:
            self._memory.give_back(self._bucket.buffer)
        self._bucket = None

    def drop(self) -> None:
        """Forget all gradients, and give the memory back."""
        self.free()
        self._clear()

    def _clear(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # a freed parameter need not be gathered for this
            for parameter in self.parameters:
                parameter.grad = None

    def _allocated(self) -> Bucket:
        if self._bucket is None:
            self._bucket = Bucket(self.parameters, self._dtype, self._layout, self._memory)
        return self._bucket


def fill_buckets(
    parameters: Sequence[nn.Parameter],
    limit: int,
    dtype_of: Callable[[nn.Parameter], torch.dtype] = gradient_dtype,
) -> list[Bucket]:
    """Buckets of at most `limit` bytes (or one parameter), in the order given, one type per bucket."""
    return [
        Bucket(portion, dtype)
        for (dtype, _), alike in groupby(parameters, key=lambda p: (dtype_of(p), p.device))
        for portion in portions(alike, lambda p: p.numel() * dtype_of(p).itemsize, limit)
    ]


def put(place: Tensor, gradient: Tensor) -> None:
    """Copy a gradient, which an embedding may have made sparse."""
    if gradient.layout == torch.strided:
        place.copy_(gradient)
    else:
        place.zero_().add_(gradient)


def move_in(bucket: Bucket) -> None:
    """Copy every parameter into the bucket and make it a view of its place there."""
    for parameter, view in bucket.views.items():
        view.copy_(parameter.detach())
    point_at(bucket)


def point_at(bucket: Bucket) -> None:
    """Make every parameter a view of its place in the bucket."""
    for parameter, view in bucket.views.items():
        parameter.data = view
