"""Shards: the part of a parameter that a rank holds, and its place in the whole parameter.

A fused matrix is several matrices, one after the other along the split dim. A rank holds a part of each:

    whole   | query         | key           | value         |     parts = (4, 4, 4), 2 ranks
    rank 0  | query 0, 1    | key 0, 1      | value 0, 1    |

Shares are equal. A part that is not divisible is padded with zeros, which belong to no whole parameter:

    whole   | rows 0 1 2 3 4    |                                   parts = (5,), 2 ranks
    rank 1  | rows 3 4, padding |
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.state.ownership import OwnedSlice, Slice


def share_of(size: int, ranks: int) -> int:
    """Return how much of a dim each of `ranks` holds, with padding."""
    return -(-size // ranks)


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `ranks` holds an equal share of each part along `dim`; `parts` are their whole sizes."""

    dim: int
    parts: tuple[int, ...]
    rank: int
    ranks: int

    def take(self, whole: Tensor) -> Tensor:
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
        return (*shape[: self.dim], sum(self.parts), *shape[self.dim + 1 :])

    def in_whole(self, owned: OwnedSlice) -> list[OwnedSlice]:
        """Return a box of this rank's share as boxes of the whole: of several parts, or none for padding."""
        box = owned.slice
        if len(box.shape) <= self.dim:  # one number for the whole parameter
            return [owned]
        first, end = box.offsets[self.dim], box.offsets[self.dim] + box.sizes[self.dim]
        found = []
        here = whole = 0
        for size in self.parts:
            share = share_of(size, self.ranks)
            num_true = min(share, size - self.rank * share)  # the rest is padding; negative: all of it
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


def part_of(parameter: nn.Parameter, shard: Shard) -> nn.Parameter:
    """Make a new parameter of this rank's share: autograd remembers the shape of one that was used."""
    part = nn.Parameter(shard.take(parameter.data), requires_grad=parameter.requires_grad)
    part.__dict__.update(parameter.__dict__)
    return part


def replace_parameters(model: nn.Module, parts: dict[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters by their parts in every module that has them: tied modules stay tied."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in parts:
                module._parameters[name] = parts[parameter]
