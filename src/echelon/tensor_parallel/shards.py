"""Which part of a parameter a rank holds, and where it lies in the whole parameter.

A fused matrix is several matrices, one after the other along the split dim. A rank holds a part of each:

    whole   | query         | key           | value         |     parts = (4, 4, 4), 2 ranks
    rank 0  | query 0, 1    | key 0, 1      | value 0, 1    |

Shares are equal. A part that is not divisible is padded with zeros, which belong to no whole parameter:

    whole   | rows 0 1 2 3 4    |                                   parts = (5,), 2 ranks
    rank 1  | rows 3 4, padding |
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.huggingface import is_transposed
from echelon.ownership import OwnedSlice, Slice
from echelon.tensor_parallel.styles import Style


class Cut(NamedTuple):
    """The parameter `name` of a module is split along `dim`; it is matrices in one, in these proportions."""

    name: str
    dim: int
    parts: tuple[int, ...] = (1,)

    def sizes(self, parameter: Tensor) -> tuple[int, ...]:
        """The sizes of the matrices, which are the dim together."""
        unit = parameter.shape[self.dim] // sum(self.parts)
        return tuple(unit * part for part in self.parts)


def cuts(module: nn.Module, style: Style) -> list[Cut]:
    """The parameters of a module that its style splits."""
    outputs, inputs = (1, 0) if is_transposed(module) else (0, 1)
    if style.word == "experts":
        first = Cut("gate_up_proj", 1, (1, 1)) if hasattr(module, "gate_up_proj") else Cut("up_proj", 1)
        return [first, Cut("down_proj", 2)]
    if isinstance(module, nn.Embedding) and style.word in ("vocabulary", "column"):
        return [Cut("weight", 0 if style.word == "vocabulary" else 1, style.parts)]
    if style.word == "norm":
        return [Cut(name, 0) for name in ("weight", "bias") if name in module._parameters]
    if style.word in ("column", "vocabulary") and not style.whole:
        return [Cut("weight", outputs, style.parts), Cut("bias", 0, style.parts)]
    return [Cut("weight", inputs)] if style.word == "row" else []


def rows_of_rank(style: Style, size: int, rank: int, ranks: int) -> list[tuple[int, int]]:
    """Where the outputs of a column lie that a rank computes, as (begin, end); some parts it uses whole."""
    unit, begin, spans = size // sum(style.parts), 0, []
    for index, part in enumerate(style.parts):
        is_whole = index in style.whole
        share = unit * part if is_whole else unit * part // ranks
        first = begin if is_whole else begin + share * rank
        spans.append((first, first + share))
        begin += unit * part
    return spans


def share_of(size: int, ranks: int) -> int:
    """How much of a dim each of `ranks` holds, with padding."""
    return -(-size // ranks)


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `ranks` holds an equal share of each part along `dim`; `parts` are their whole sizes."""

    dim: int
    parts: tuple[int, ...]
    rank: int
    ranks: int

    def take(self, whole: Tensor) -> Tensor:
        """This rank's share, in memory of its own."""
        pieces = [self._take_part(part) for part in whole.split(self.parts, self.dim)]
        return torch.cat(pieces, self.dim).contiguous()

    def _take_part(self, part: Tensor) -> Tensor:
        size = part.shape[self.dim]
        share = share_of(size, self.ranks)
        begin, end = (min(share * rank, size) for rank in (self.rank, self.rank + 1))
        taken, padding = part.narrow(self.dim, begin, end - begin), share - (end - begin)
        later_dims = [0, 0] * (part.ndim - 1 - self.dim)
        return F.pad(taken, [*later_dims, 0, padding]) if padding else taken

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the parameter of which this rank holds `shape`."""
        return (*shape[: self.dim], sum(self.parts), *shape[self.dim + 1 :])

    def in_whole(self, owned: OwnedSlice) -> list[OwnedSlice]:
        """A box of this rank's share as boxes of the whole: it may touch several parts, or only padding."""
        box = owned.slice
        if len(box.shape) <= self.dim:  # one number for the whole parameter
            return [owned]
        first, end = box.offsets[self.dim], box.offsets[self.dim] + box.sizes[self.dim]
        found = []
        here = whole = 0
        for size in self.parts:
            share = share_of(size, self.ranks)
            num_true = min(share, size - self.rank * share)  # the rest is padding
            low, high = max(first, here), min(end, here + num_true)
            if low < high:
                begin = whole + self.rank * share + low - here
                tensor = owned.tensor.narrow(self.dim, low - first, high - low)
                found.append(OwnedSlice(self._moved(box, begin, high - low), tensor))
            here, whole = here + share, whole + size
        return found

    def _moved(self, box: Slice, begin: int, size: int) -> Slice:
        return box._replace(
            shape=self.whole_shape(box.shape),
            offsets=(*box.offsets[: self.dim], begin, *box.offsets[self.dim + 1 :]),
            sizes=(*box.sizes[: self.dim], size, *box.sizes[self.dim + 1 :]),
        )
