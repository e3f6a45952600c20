"""Many tensors of one type in one piece of memory, so that few kernels and one allocation serve them all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.collectives.buffer_layout import block_size, lay_out


def flat_views(like: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Uninitialised tensors of the shapes and strides of `like`, in one memory per device.

    A tensor of `like` that is not dense (a slice of columns) gets the strides that a copy of it has.
    """
    views: dict[int, Tensor] = {}
    for device, indices in _by_memory(like).items():
        layout = lay_out((like[index].numel() for index in indices), block_size(dtype))
        memory = torch.empty(layout.size, dtype=dtype, device=device)
        for index, (begin, _) in zip(indices, layout.places, strict=True):
            views[index] = memory.as_strided(like[index].shape, dense_strides(like[index]), begin)
    return [views[index] for index in range(len(like))]


def have_same_layout(tensor: Tensor, other: Tensor) -> bool:
    """Whether the elements of two tensors of one shape lie alike in memory. The stride of a dim of size 1
    moves nothing, and may be any."""
    pairs = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    return all(size == 1 or stride == other_stride for size, stride, other_stride in pairs)


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Those of a copy of the tensor."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def _by_memory(tensors: Sequence[Tensor]) -> dict[torch.device, list[int]]:
    indices: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices.setdefault(tensor.device, []).append(index)
    return indices
