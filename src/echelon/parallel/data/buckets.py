"""Buckets: gradients of several parameters in one contiguous buffer, reduced at once.

A step's first gradient of a parameter moves to the parameter's view of the buffer, which from then on is its
`.grad`: further microbatches add where the sum is reduced, and nothing is copied out. (To zero the buffer and
have autograd add the first gradient too would move twice the memory.) Buckets are filled in the order in
which gradients are expected.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from echelon.collectives.buffer_layout import BufferLayout, block_size, lay_out
from echelon.parallel.data.grad_dtype import gradient_dtype
from echelon.parallel.data.gradient_memory import GradientKind, GradientMemory, NewMemory


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
        for begin, end in self._layout.gaps():
            self.buffer[begin:end].zero_()
        self.views = self._cut(parameters)

    def _cut(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        return {
            parameter: self.buffer[begin:end].view(parameter.shape)
            for parameter, (begin, end) in zip(parameters, self._layout.places, strict=True)
        }

    def reallocate(self) -> None:
        """Move to new memory; whoever has a view of the old keeps that."""
        self.buffer = self.buffer.clone()
        self.views = self._cut(self.views)

    def open(self) -> None:
        """Forget all gradients."""
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


def fill_buckets(
    parameters: Sequence[nn.Parameter],
    limit: int,
    dtype_of: Callable[[nn.Parameter], torch.dtype] = gradient_dtype,
) -> list[Bucket]:
    """Buckets of at most `limit` bytes (or one parameter), in the order given, one type per bucket."""
    buckets = []
    for (dtype, _), alike in groupby(parameters, key=lambda p: (dtype_of(p), p.device)):
        taken: list[nn.Parameter] = []
        size = 0
        for parameter in alike:
            added = parameter.numel() * dtype.itemsize
            if taken and size + added > limit:
                buckets.append(Bucket(taken, dtype))
                taken, size = [], 0
            taken.append(parameter)
            size += added
        buckets.append(Bucket(taken, dtype))
    return buckets


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
