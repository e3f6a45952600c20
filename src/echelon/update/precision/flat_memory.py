"""Many tensors of one type in one piece of memory, so that few kernels and one allocation serve them all."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from echelon.collectives.buffer_layout import block_size, lay_out, portions, round_up
from echelon.nn.triton_support import has_triton


def flat_views(like: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Uninitialised tensors of the shapes and strides of `like`, in one memory per device. A tensor of `like`
    that is not dense (a slice of columns) gets the strides that a copy of it has."""
    views: dict[int, Tensor] = {}
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(like):
        by_device.setdefault(tensor.device, []).append(index)
    for device, indices in by_device.items():
        _, of_device = views_like(
            [like[index] for index in indices], dtype, partial(torch.empty, device=device)
        )
        views |= zip(indices, of_device, strict=True)
    return [views[index] for index in range(len(like))]


def views_like(
    like: Sequence[Tensor], dtype: torch.dtype, empty: Callable[..., Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return the memory of `empty(size, dtype=…)`, and its view for each tensor of `like`."""
    layout = lay_out((each.numel() for each in like), block_size(dtype))
    memory = empty(layout.size, dtype=dtype)
    start = int(memory.storage_offset())  # pinned memory begins at a page of its storage
    views = [
        memory.as_strided(each.shape, dense_strides(each), start + begin)
        for each, (begin, _) in zip(like, layout.places, strict=True)
    ]
    return memory, views


def without_memory(
    like: Tensor, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """Return a tensor like this one with one element of memory: it stands for a copy that is made later."""
    return torch.zeros((), dtype=dtype, device=like.device if device is None else device).expand(like.shape)


def have_same_layout(tensor: Tensor, other: Tensor) -> bool:
    """Return whether the elements of two tensors of one shape lie alike in memory. The stride of a dim of
    size 1 moves nothing, and may be any."""
    pairs = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    return all(size == 1 or stride == other_stride for size, stride, other_stride in pairs)


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


# Bytes of copies. The largest is the same for every model of 10 million parameters or more, of which it is
# less than half. Copies below the smallest are made at once: dividing them costs time and saves little.
_LARGEST_PORTION = 16 * 2**20
_SMALLEST_PORTION = 2**20


def divide(weights: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The weights in portions, by what must be copied of their gradients: at most half of it at a time. So
    bf16 gradients and their copies take no more than float32 gradients would, unless one weight is more than
    half of all, or all copies are small."""
    sizes = {
        weight: _copied_bytes(weight.grad, master)
        for weight, master in zip(weights, masters, strict=True)
        if weight.grad is not None
    }
    largest = max(_SMALLEST_PORTION, min(_LARGEST_PORTION, sum(sizes.values()) // 2))
    yield from portions(weights, sizes.__getitem__, largest)


def as_float32(weights: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The gradients of `weights` as those of `masters`; copies share one memory."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    copied = [
        index
        for index, (gradient, master) in enumerate(zip(gradients, masters, strict=True))
        if _needs_copy(gradient, master) and not gradient.is_sparse
    ]
    copies = flat_views([masters[index].detach() for index in copied], torch.float32)
    if copies:
        torch._foreach_copy_(copies, [gradients[index] for index in copied])
    for index, copy in zip(copied, copies, strict=True):
        gradients[index] = copy
    return [gradient.float() if gradient.is_sparse else gradient for gradient in gradients]


def _copied_bytes(gradient: Tensor, master: nn.Parameter) -> int:
    """Return the bytes of a float32 copy of the gradient, or 0 if none is needed."""
    if not _needs_copy(gradient, master):
        return 0
    numel = gradient._values().numel() if gradient.is_sparse else gradient.numel()
    return round_up(numel, block_size(torch.float32)) * torch.float32.itemsize


def _needs_copy(gradient: Tensor, master: nn.Parameter) -> bool:
    if gradient.dtype != torch.float32:
        return True
    return not gradient.is_sparse and not have_same_layout(gradient, master)


def has_kernel(tensor: Tensor) -> bool:
    """Return whether Triton has kernels for it."""
    return tensor.is_cuda and has_triton()
