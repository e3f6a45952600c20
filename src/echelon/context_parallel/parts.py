"""Who holds which positions of a sequence, and who attends to what. Pure: no rank needs to be there.

A sequence is cut into 2C equal chunks, and rank r holds the chunks r and 2C−1−r, one after the other. Early
positions attend to little and late ones to much: one of each makes every rank's work the same. For C = 3,
with what each chunk attends to (■ all, ◣ up to the same position):

                  chunk 0 1 2 3 4 5
    rank 0   chunk 0    ◣
             chunk 5    ■ ■ ■ ■ ■ ◣         5 ■, 2 ◣
    rank 1   chunk 1    ■ ◣
             chunk 4    ■ ■ ■ ■ ◣           5 ■, 2 ◣
    rank 2   chunk 2    ■ ■ ◣
             chunk 3    ■ ■ ■ ◣             5 ■, 2 ◣
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.errors import UserError


class Block(NamedTuple):
    """The local positions of a rank, `queries`, that attend to `keys` among those of another rank."""

    queries: slice
    keys: slice
    causal: bool  # each to those up to its own place; else each to all


def positions(length_here: int, rank: int, ranks: int, device: torch.device | str | None = None) -> Tensor:
    """The places in the whole sequence of the `length_here` positions that `rank` holds, [length_here].

    positions(4, rank=1, ranks=2)                   # [2, 3, 4, 5] of 8
    """
    starts = _starts(length_here * ranks, rank, ranks)
    each = length_here // len(starts)
    return torch.cat([torch.arange(start, start + each, device=device) for start in starts])


def take(tensor: Tensor, rank: int, ranks: int, dim: int = 1) -> Tensor:
    """What `rank` holds of a whole tensor whose dim `dim` is the sequence: a contiguous copy.

    tokens, targets = (take(whole, group.rank, group.size) for whole in batch)
    """
    length = tensor.shape[dim]
    starts = _starts(length, rank, ranks)
    each = length // ranks // len(starts)
    return torch.cat([tensor.narrow(dim, start, each) for start in starts], dim).contiguous()


def put_together(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """The whole tensor again, from what ranks 0 … C−1 hold of it."""
    places = [positions(part.shape[dim], rank, len(parts)) for rank, part in enumerate(parts)]
    return torch.cat(list(parts), dim).index_select(dim, torch.cat(places).argsort().to(parts[0].device))


def block_of(rank: int, source: int, length: int) -> Block:
    """What the `length` positions of `rank` attend to among those of `source`: see the grid above.

    Against itself a rank's chunks are a sequence in order. Below, its own chunks stand between the two of the
    source; above, the two of the source stand between its own.
    """
    first, second, both = slice(0, length // 2), slice(length // 2, length), slice(0, length)
    if source == rank:
        return Block(both, both, causal=True)
    return Block(both, first, causal=False) if source < rank else Block(second, both, causal=False)


def check_length(length: int, ranks: int) -> None:
    """Refuse a sequence that cannot be cut into equal chunks; one rank alone holds any, uncut."""
    chunks = 2 * ranks
    if ranks > 1 and length % chunks:
        below = length - length % chunks
        mend = f"{below} or {below + chunks}" if below else str(chunks)
        raise UserError(
            f"a sequence of {length} positions with context={ranks}: it is cut into {chunks} equal chunks, "
            f"two a rank; make its length a multiple of {chunks}, such as {mend}"
        )


def _starts(length: int, rank: int, ranks: int) -> tuple[int, ...]:
    """Where in the sequence the chunks of `rank` begin."""
    check_length(length, ranks)
    if ranks == 1:
        return (0,)
    chunk = length // (2 * ranks)
    return rank * chunk, (2 * ranks - 1 - rank) * chunk
