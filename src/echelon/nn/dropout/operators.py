"""Keyed dropout as operators that torch.compile records, without a break, and does not look into.

The key of a call changes with every step, so it comes as data: a tensor in host memory, which is read when
the operator runs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from echelon.nn.dropout.fused import dropped
from echelon.nn.dropout.mask import Draw, mask_of
from echelon.nn.hashing import hash_of


@torch.library.custom_op("echelon::keyed_dropout", mutates_args=())
def keyed_dropout(
    x: Tensor,
    key: Tensor,
    first_sample: Tensor,
    use: int,
    p: float,
    indices: Tensor | None,
    rank: int,
    ranks: int,
) -> Tensor:
    """x · mask / (1 - p). `key`: [hash of seed, step and layer; uses before]; `use` counts on from there.

    The last dim of `x` is part `rank` of `ranks`; `indices` are those of its dim 1.
    """
    return dropped(x, _draw(key, first_sample, use, p, indices, rank, ranks))


@torch.library.custom_op("echelon::keep_mask", mutates_args=())
def keep_mask(
    key: Tensor,
    first_sample: Tensor,
    use: int,
    p: float,
    indices: Tensor | None,
    rank: int,
    ranks: int,
    shape: Sequence[int],
    device: torch.device,
) -> Tensor:
    """True where an element is kept; see `keyed_dropout`. Compiled code relies on contiguous memory."""
    return mask_of(_draw(key, first_sample, use, p, indices, rank, ranks), shape, device).contiguous()


class HasIndices(Protocol):
    indices: Callable[[int], Tensor] | None


# Dropouts that compiled code has drawn for, by number. A backward pass may ask again, long after the call.
DROPOUTS: WeakValueDictionary[int, HasIndices] = WeakValueDictionary()


@torch.library.custom_op("echelon::global_indices", mutates_args=())
def global_indices(dropout: Tensor, size: int, device: torch.device) -> Tensor:
    """The indices in the whole dim of the `size` ones that are here, by the dropout of this number."""
    indices = DROPOUTS[int(dropout)].indices
    assert indices is not None
    return indices(size).to(device, torch.int64)


def _draw(
    key: Tensor, first_sample: Tensor, use: int, p: float, indices: Tensor | None, rank: int, ranks: int
) -> Draw:
    start, uses = key.tolist()
    first = first_sample if first_sample.is_cuda else int(first_sample)
    part = (rank, ranks) if ranks > 1 else None
    return Draw(hash_of(uses + use, start=start), first, p, indices, part)


@keyed_dropout.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@keep_mask.register_fake
def _(
    key: Tensor,  # noqa: ARG001
    first_sample: Tensor,  # noqa: ARG001
    use: int,  # noqa: ARG001
    p: float,  # noqa: ARG001
    indices: Tensor | None,  # noqa: ARG001
    rank: int,  # noqa: ARG001
    ranks: int,  # noqa: ARG001
    shape: Sequence[int],
    device: torch.device,
) -> Tensor:
    return torch.empty(*shape, dtype=torch.bool, device=device)


@global_indices.register_fake
def _(dropout: Tensor, size: int, device: torch.device) -> Tensor:  # noqa: ARG001
    return torch.empty(size, dtype=torch.int64, device=device)


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    _, key, first_sample, use, p, indices, rank, ranks = inputs
    ctx.save_for_backward(key, first_sample, indices)
    ctx.numbers = use, p, rank, ranks


def _drop_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    key, first_sample, indices = ctx.saved_tensors
    use, p, rank, ranks = ctx.numbers
    dropped_gradient = keyed_dropout(gradient, key, first_sample, use, p, indices, rank, ranks)
    return dropped_gradient, *(None,) * 7


keyed_dropout.register_autograd(_drop_gradient, setup_context=_keep_arguments)
