"""Divide the positions of a sequence among ranks, and say which attend to which. Pure functions.

A sequence is split into 2C equal chunks, and rank r holds the chunks r and 2C−1−r, one after the other. Early
positions attend to few others and late ones to many: one chunk of each makes every rank's work equal. For
C = 3, the chunks that each chunk attends to (■ all of it, ◣ up to the same position):

                  chunk 0 1 2 3 4 5
    rank 0   chunk 0    ◣
             chunk 5    ■ ■ ■ ■ ■ ◣         5 ■, 2 ◣
    rank 1   chunk 1    ■ ◣
             chunk 4    ■ ■ ■ ■ ◣           5 ■, 2 ◣
    rank 2   chunk 2    ■ ■ ◣
             chunk 3    ■ ■ ■ ◣             5 ■, 2 ◣
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.errors import UserError, raise_errors
from echelon.nn.sequence import View


class Block(NamedTuple):
    """The local positions `queries` of a rank that attend to the local positions `keys` of another rank."""

    queries: slice
    keys: slice
    causal: bool  # each query to the keys up to its own position; else each to all


def positions(length_here: int, rank: int, ranks: int, device: torch.device | str | None = None) -> Tensor:
    """The positions in the whole sequence of the `length_here` tokens that `rank` holds, [length_here].

    positions(4, rank=1, ranks=2)                   # [2, 3, 4, 5] of 8
    """
    starts = _starts(length_here * ranks, rank, ranks)
    chunk = length_here // len(starts)
    return torch.cat([torch.arange(start, start + chunk, device=device) for start in starts])


def take(tensor: Tensor, rank: int, ranks: int, dim: int = 1) -> Tensor:
    """The part that `rank` holds of a tensor whose dim `dim` is the whole sequence: a contiguous copy.
    tokens, targets = (take(whole, group.rank, group.size) for whole in batch)"""
    length = tensor.shape[dim]
    starts = _starts(length, rank, ranks)
    chunk = length // ranks // len(starts)
    return torch.cat([tensor.narrow(dim, start, chunk) for start in starts], dim).contiguous()


def put_together(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """The whole tensor, from the parts of ranks 0 … C−1: the inverse of `take`."""
    if len(parts) == 1:
        return parts[0]
    firsts, seconds = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat([*firsts, *reversed(seconds)], dim)


def count_before(limit: int, length_here: int, rank: int, ranks: int) -> int:
    """Count those of the `length_here` positions of `rank` that are below `limit`: the first ones."""
    starts = _starts(length_here * ranks, rank, ranks)
    chunk = length_here // len(starts)
    return sum(min(max(limit - start, 0), chunk) for start in starts)


def block_of(rank: int, source: int, length: int) -> Block:
    """Return which of the `length` positions of `rank` attend to which of `source`: see the grid above. A
    rank's two chunks are in order, and those of a higher rank lie between the two of a lower one."""
    first, second, both = slice(0, length // 2), slice(length // 2, length), slice(0, length)
    if source == rank:
        return Block(both, both, causal=True)
    return Block(both, first, causal=False) if source < rank else Block(second, both, causal=False)


def check_length(length: int, ranks: int) -> None:
    """Refuse a sequence that cannot be split into equal chunks. One rank alone does not split it."""
    chunks = 2 * ranks
    if ranks > 1 and length % chunks:
        below = length - length % chunks
        fix = f"{below} or {below + chunks}" if below else str(chunks)
        raise UserError(
            f"a sequence of {length} positions with context={ranks} is not divisible by {chunks}: each rank "
            f"takes two of {chunks} equal chunks; use a length of {fix}"
        )


def _starts(length: int, rank: int, ranks: int) -> tuple[int, ...]:
    check_length(length, ranks)
    if ranks == 1:
        return (0,)
    chunk = length // (2 * ranks)
    return rank * chunk, (2 * ranks - 1 - rank) * chunk


# What attention over several ranks demands of its inputs.


def check_inputs(name: str, query: Tensor, key: Tensor, value: Tensor, group: Group) -> None:
    """Refuse shapes and types that do not go together, all errors at once."""
    errors = []
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape:
        errors.append(
            f"{shapes}: all must be [batch, heads, sequence, width], key and value of the same shape; "
            "reshape them"
        )
    elif (query.shape[0], *query.shape[2:]) != (key.shape[0], *key.shape[2:]):
        errors.append(
            f"{shapes}: only the number of heads may differ; give all three the same batch, sequence and "
            "width"
        )
    elif query.shape[1] % key.shape[1]:
        errors.append(
            f"{shapes}: {query.shape[1]} heads are not divisible by {key.shape[1]} key/value heads; make the "
            "number of heads a multiple"
        )
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        dtypes = f"query {query.dtype}, key {key.dtype}, value {value.dtype}"
        errors.append(f"{dtypes}: all must have one dtype; cast them")
    raise_errors(name, errors)
    check_length(query.shape[2] * group.size, group.size)


class SharedView(View):
    """This rank's part of a sequence that the ranks of `group`, along `context`, share.

    sequence.assign(model, RingView(mesh.group("context")), wrapping)
    logits = model(take(tokens, group.rank, group.size))
    """

    def __init__(self, group: Group) -> None:
        self.parts = group.size
        self._group = group

    def positions(self, length: int, device: torch.device) -> Tensor:
        return self._in_sequence(positions(length, self._group.rank, self._group.size, device))

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor: ...
