"""The storages behind tensors: which one a tensor lies in, and what of it the tensor uses."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def address_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, which holds also while the storage has no memory."""
    return int(tensor.untyped_storage()._cdata)


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return the storages of tensors, but for those that have none (sparse ones)."""
    return {address_of(tensor) for tensor in tensors if tensor.layout is torch.strided}


def weight_storages(modules: Iterable[nn.Module]) -> set[int]:
    """Return the storages of parameters and buffers, as the modules have them now."""
    tensors: list[Tensor | None] = []
    for module in modules:
        tensors += [*module._parameters.values(), *module._buffers.values()]
    with torch._C.DisableTorchFunctionSubclass():
        return storages_of(tensor for tensor in tensors if tensor is not None)


def is_dense(tensor: Tensor) -> bool:
    """Return whether its elements lie in memory without gaps, so that a copy has the same strides."""
    if tensor.is_contiguous() or (
        tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    ):
        return True
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage have elements in common, as far as their ends tell."""
    (a, b), (c, d) = _span(one), _span(other)
    return a < d and c < b


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of the storage that a tensor uses, and the end."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset())
    return begin * tensor.element_size(), (begin + last + 1) * tensor.element_size()
