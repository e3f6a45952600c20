"""The gradients of weights below float32 as those of their float32 masters.

A gradient that is float32 already, in the layout of the master, is taken as it is. Others are copied, in
portions: the copies of one portion are gone before the next are made.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from echelon.collectives.buffer_layout import block_size, round_up
from echelon.update.precision.flat_memory import flat_views, have_same_layout

# Bytes of copies. The same for every model of 10 million parameters or more, of which it is less than half.
_LARGEST_PORTION = 16 * 2**20


def divide(weights: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The weights in portions, by what must be copied of their gradients: at most half of it at a time.

    So bf16 gradients and their copies take no more than float32 gradients would, unless one weight is more
    than half of all.
    """
    sizes = [
        _copied_bytes(weight.grad, master)
        for weight, master in zip(weights, masters, strict=True)
        if weight.grad is not None
    ]
    limit = min(_LARGEST_PORTION, sum(sizes) // 2)
    portion: list[nn.Parameter] = []
    taken = 0
    for weight, size in zip(weights, sizes, strict=True):
        if taken and size and taken + size > limit:
            yield portion
            portion, taken = [], 0
        portion.append(weight)
        taken += size
    if portion:
        yield portion


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
    """What a float32 copy of the gradient takes, or 0 if none is needed."""
    if not _needs_copy(gradient, master):
        return 0
    numel = gradient._values().numel() if gradient.is_sparse else gradient.numel()
    return round_up(numel, block_size(torch.float32)) * torch.float32.itemsize


def _needs_copy(gradient: Tensor, master: nn.Parameter) -> bool:
    if gradient.dtype != torch.float32:
        return True
    return not gradient.is_sparse and not have_same_layout(gradient, master)
