"""Tensors as flat memory, and back."""

from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """How the elements of a tensor lie in memory without gaps."""

    size: torch.Size
    stride: tuple[int, ...]

    def shape(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.size, self.stride)


def flatten(tensor: Tensor) -> tuple[Tensor, Layout]:
    """The elements in the order of memory; of a tensor with gaps, those of a copy without, in this order."""
    tensor = tensor.detach()
    if not is_dense(tensor):
        tensor = tensor.clone()
    return tensor.as_strided((tensor.numel(),), (1,)), Layout(tensor.size(), tensor.stride())


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie in memory without gaps."""
    if tensor.is_contiguous() or (
        tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    ):
        return True
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def shares_elements(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory, as those of an expanded one."""
    return tensor.nbytes > tensor.untyped_storage().nbytes()


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage have elements in common, as far as their ends tell."""
    (a, b), (c, d) = _span(one), _span(other)
    return a < d and c < b


def _span(tensor: Tensor) -> tuple[int, int]:
    """In bytes of the storage."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset())
    return begin * tensor.element_size(), (begin + last + 1) * tensor.element_size()
