"""Keyed dropout inside of compiled code: operators that torch.compile records without looking into them.

torch.compile records a layer once and replays it: the open scope would be recorded as a constant. So the
scope is read before the layer is called, and the recorded code finds it in tensors: the key of a call, which
changes with every step, is a tensor in host memory, which is read when the operator runs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from echelon.nn.dropout.mask import Draw, dropped, mask_of
from echelon.nn.dropout.training_position import TrainingPosition
from echelon.nn.hashing import hash_of, signed


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
    """Compute x · mask / (1 - p).

    `key`: [hash of seed, step and layer; uses before]; `use` counts on from there.
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
    """Draw a mask; see `keyed_dropout`. Compiled code relies on contiguous memory."""
    return mask_of(_draw(key, first_sample, use, p, indices, rank, ranks), shape, device).contiguous()


class HasIndices(Protocol):
    indices: Callable[[int], Tensor] | None


# Dropouts that compiled code has drawn for, by number. A backward pass may ask again, long after the call.
DROPOUTS: WeakValueDictionary[int, HasIndices] = WeakValueDictionary()


@torch.library.custom_op("echelon::global_indices", mutates_args=())
def global_indices(dropout: Tensor, size: int, device: torch.device) -> Tensor:
    """Return the indices in the whole dim of the `size` ones that are here, by the dropout of this number."""
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
def _(*arguments: Any) -> Tensor:
    *_, shape, device = arguments
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


class DrawsAhead:
    """The draws of one dropout in one call of compiled code. `num_drawn` counts them."""

    def __init__(self, position: TrainingPosition, layer: int, number: int) -> None:
        """`number`: that of the dropout in `DROPOUTS`."""
        assert isinstance(position.step, int), "passes with compiled dropout are not recorded"
        start, first = hash_of(position.seed, position.step, layer), position.first_sample
        self.dropout = torch.tensor(number)
        self.key = torch.tensor([signed(start), position.uses.get(layer, 0)])  # in host memory
        self.first_sample = first if isinstance(first, Tensor) else torch.tensor(first)
        self.num_drawn = 0
