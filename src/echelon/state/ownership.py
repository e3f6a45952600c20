"""Ownership: which slices of which named global tensors a rank holds.

Every rank lists all that it needs to go on: weights, float32 masters, optimizer state, buffers and counters.
Whole state dicts, exported files and checkpoints are put together from these lists, and know no strategy.
A `Shard` is the part of a parameter that a rank holds where matrices are split.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VALUE = "value"  # the `part` that is a weight or buffer itself
MASTER = "master"  # its float32 master
AVERAGE = "(average)"  # the average of the weight; any other part is a key of the optimizer's state
ENGINE = "(engine)"  # the name under which an engine's own counters stand; no parameter can have it


class Slice(NamedTuple):
    """A box of one global tensor, by its place. Several ranks may hold the same box."""

    name: str
    part: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return self.sizes == self.shape

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def box(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))


class OwnedSlice(NamedTuple):
    """A slice, and the memory on this rank that holds it, in the shape of the box."""

    slice: Slice
    tensor: Tensor


class LocalParameter(NamedTuple):
    """The part of one parameter that this rank's optimizer updates: all of it, or a run of its elements.

    `tensor` is the memory to update, and its `.grad` the gradient. A run is flat: `begin` says where in the
    flattened parameter it starts. `parameter` is the model's own, whatever it holds at the moment.
    """

    name: str
    parameter: nn.Parameter
    tensor: nn.Parameter
    begin: int = 0


def whole_slice(name: str, tensor: Tensor, part: str = VALUE) -> Slice:
    shape = tuple(tensor.shape)
    return Slice(name, part, shape, (0,) * len(shape), shape)


def run_slices(name: str, shape: tuple[int, ...], begin: int, end: int) -> list[Slice]:
    """Return the boxes that make up elements begin…end of a flattened tensor, in order.

    A run through a 3 × 4 matrix from element 2 to 9 is three boxes:

        . . a a        a: row 0, columns 2 to 3
        b b b b        b: row 1, all columns
        c . . .        c: row 2, column 0
    """
    if begin >= end:
        return []
    if not shape:
        return [Slice(name, VALUE, (), (), ())]
    inner = math.prod(shape[1:])
    first, last = -(-begin // inner), end // inner  # the rows that the run holds whole
    boxes: list[Slice] = []
    if first > last:  # it begins and ends inside one row
        return _inside_row(name, shape, begin // inner, begin % inner, end - begin // inner * inner)
    if begin < first * inner:
        boxes += _inside_row(name, shape, first - 1, begin % inner, inner)
    if first < last:
        rest = shape[1:]
        boxes.append(Slice(name, VALUE, shape, (first, *(0 for _ in rest)), (last - first, *rest)))
    if last * inner < end:
        boxes += _inside_row(name, shape, last, 0, end % inner)
    return boxes


def _inside_row(name: str, shape: tuple[int, ...], row: int, begin: int, end: int) -> list[Slice]:
    return [
        Slice(name, VALUE, shape, (row, *box.offsets), (1, *box.sizes))
        for box in run_slices(name, shape[1:], begin, end)
    ]


def own_state(part: str, value: Tensor, slices: Sequence[Slice]) -> list[OwnedSlice]:
    """Place state of the elements that `slices` cover; state of another size belongs to them all."""
    value = value.to_dense() if value.is_sparse else value  # SGD's momentum of a sparse gradient
    if value.dim() == 0 or value.numel() != sum(box.numel for box in slices):  # or of rows and columns
        return [OwnedSlice(whole_slice(slices[0].name, value, part), value)] if slices else []
    return [OwnedSlice(box._replace(part=part), tensor) for box, tensor in own_run(value, slices)]


def own_run(run: Tensor, slices: Sequence[Slice]) -> list[OwnedSlice]:
    """Place memory that holds the boxes of `slices` one after the other."""
    pieces = run.detach().flatten().split([box.numel for box in slices])
    return [OwnedSlice(box, piece.view(box.sizes)) for box, piece in zip(slices, pieces, strict=True)]


def own_counter(part: str, value: float | Tensor, dtype: torch.dtype = torch.float64) -> OwnedSlice:
    return OwnedSlice(Slice(ENGINE, part, (), (), ()), torch.as_tensor(value).to(dtype))


class StateNames(NamedTuple):
    """A model's names, from before anything of it was given away; each → the first name of the same thing.

    `parameters` are those of parameters, where tied weights have several; `state` all of the state dict.
    `trained` are the first names of the parameters that get gradients, and `attributes` what users have set
    on parameters (p.no_decay = True).
    """

    parameters: dict[str, str]
    state: dict[str, str]
    trained: frozenset[str]
    attributes: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, module: nn.Module) -> "StateNames":
        first: dict[int, str] = {}
        parameters = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        state = {name: parameters.get(name, name) for name in module.state_dict()}
        trained = frozenset(name for name, p in module.named_parameters() if p.requires_grad)
        attributes = {name: dict(vars(p)) for name, p in module.named_parameters() if vars(p)}
        return cls(parameters, state, trained, attributes)


def share_of(size: int, ranks: int) -> int:
    """Return how much of a dim each of `ranks` holds, with padding."""
    return -(-size // ranks)


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `ranks` holds an equal share of each part along `dim`; `parts` are their whole sizes.

    A fused matrix is several matrices, one after the other along the split dim. A rank holds a part of each:

        whole   | query         | key           | value         |     parts = (4, 4, 4), 2 ranks
        rank 0  | query 0, 1    | key 0, 1      | value 0, 1    |

    A part that is not divisible is padded with zeros, which belong to no whole parameter:

        whole   | rows 0 1 2 3 4    |                                   parts = (5,), 2 ranks
        rank 1  | rows 3 4, padding |
    """

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
