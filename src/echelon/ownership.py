"""Ownership: which slices of which named global tensors a rank holds.

Every strategy lists what its rank owns, weights and optimizer state alike. Whole state dicts (and later
checkpoints) are written over that list, once, and know no strategy.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.collectives import Group

VALUE = "value"  # the `part` that is the weight itself; any other is a key of the optimizer's state


class Slice(NamedTuple):
    """A box of one global tensor: where it lies, and along which axes other ranks hold the same box."""

    name: str
    part: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    replicated: tuple[str, ...]

    @property
    def whole(self) -> bool:
        return self.sizes == self.shape

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def box(self) -> tuple[slice, ...]:
        """What to index the whole tensor with to get this box."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))


class Owned(NamedTuple):
    """A slice, and the memory on this rank that holds it, in the shape of the box."""

    slice: Slice
    tensor: Tensor


class Held(NamedTuple):
    """What this rank's optimizer updates of one parameter: all of it, or a run of its elements.

    `tensor` is the memory to update, and its `.grad` the gradient. A run is flat: `begin` says where in the
    flattened parameter it starts. `parameter` is the model's own, whatever it holds at the moment.
    """

    name: str
    parameter: nn.Parameter
    tensor: nn.Parameter
    begin: int = 0

    @property
    def whole(self) -> bool:
        return self.tensor is self.parameter


def whole_slice(name: str, tensor: Tensor, replicated: tuple[str, ...], part: str = VALUE) -> Slice:
    """The box that is all of a tensor."""
    shape = tuple(tensor.shape)
    return Slice(name, part, shape, (0,) * len(shape), shape, replicated)


def run_slices(name: str, shape: tuple[int, ...], begin: int, end: int) -> list[Slice]:
    """The boxes that make up elements begin…end of a flattened tensor, in order.

    A run through a 3 × 4 matrix from element 2 to 9 is three boxes:

        . . a a        a: row 0, columns 2 to 3
        b b b b        b: row 1, all columns
        c . . .        c: row 2, column 0
    """
    if begin >= end:
        return []
    if not shape:
        return [Slice(name, VALUE, (), (), (), ())]
    inner = math.prod(shape[1:])
    first, last = -(-begin // inner), end // inner  # the rows that the run holds whole
    boxes: list[Slice] = []
    if first > last:  # it begins and ends inside one row
        return _inside_row(name, shape, begin // inner, begin % inner, end - begin // inner * inner)
    if begin < first * inner:
        boxes += _inside_row(name, shape, first - 1, begin % inner, inner)
    if first < last:
        rest = shape[1:]
        boxes.append(Slice(name, VALUE, shape, (first, *(0 for _ in rest)), (last - first, *rest), ()))
    if last * inner < end:
        boxes += _inside_row(name, shape, last, 0, end % inner)
    return boxes


def _inside_row(name: str, shape: tuple[int, ...], row: int, begin: int, end: int) -> list[Slice]:
    """The boxes of a run inside one row of the first dim."""
    return [
        Slice(name, VALUE, shape, (row, *box.offsets), (1, *box.sizes), ())
        for box in run_slices(name, shape[1:], begin, end)
    ]


def own_state(key: str, value: Tensor, slices: Sequence[Slice]) -> list[Owned]:
    """An optimizer's state of the elements that `slices` cover; a single number belongs to them all."""
    if value.dim() == 0:
        return [Owned(slices[0]._replace(part=key, shape=(), offsets=(), sizes=()), value)]
    return [Owned(its._replace(part=key), tensor) for its, tensor in own_run(value, slices)]


def own_run(run: Tensor, slices: Sequence[Slice]) -> list[Owned]:
    """Memory that holds the boxes of `slices` one after the other."""
    pieces = run.detach().flatten().split([its.numel for its in slices])
    return [Owned(its, piece.view(its.sizes)) for its, piece in zip(slices, pieces, strict=True)]


class StateNames(NamedTuple):
    """A model's names, from before anything of it was given away; each → the first name of the same thing.

    `parameters` are those of parameters, where tied weights have several; `state` all of the state dict.
    """

    parameters: dict[str, str]
    state: dict[str, str]

    @classmethod
    def of(cls, module: nn.Module) -> "StateNames":
        first: dict[int, str] = {}
        parameters = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        return cls(parameters, {name: parameters.get(name, name) for name in module.state_dict()})


def assemble(
    owned: Sequence[Owned], group: Group, device: torch.device, *, sharded: bool
) -> dict[tuple[str, str], Tensor]:
    """Every tensor whole, on every rank of the group, by (name, part); copies.

    Unless `sharded`, every rank holds everything whole. Else the ranks tell each other what they own; then
    the first owner of each box puts it into a tensor of zeros, and these are summed.
    """
    if not sharded:
        return {(its.slice.name, its.slice.part): its.tensor.detach().clone() for its in owned}
    mine = {(its.slice.name, its.slice.part, its.slice.offsets): its.tensor for its in owned}
    lists = _exchange([(*its.slice, _dtype_name(its.tensor)) for its in owned], group, device)
    whole: dict[tuple[str, str], Tensor] = {}
    taken: set[tuple[Any, ...]] = set()
    for rank, boxes in enumerate(lists):
        for name, part, shape, offsets, sizes, replicated, dtype in boxes:
            its = Slice(name, part, tuple(shape), tuple(offsets), tuple(sizes), tuple(replicated))
            key = (name, part)
            if key not in whole:
                whole[key] = torch.zeros(its.shape, dtype=getattr(torch, dtype), device=device)
            if (*key, its.offsets) not in taken and rank == group.rank:
                whole[key][its.box] = mine[name, part, its.offsets].detach()
            taken.add((*key, its.offsets))
    with group.ledger.about("assembly"):
        for tensor in whole.values():  # as bytes: zeros add to any type, and to −0.0, without a trace
            if tensor.numel():
                group.all_reduce(tensor.view(-1).view(torch.uint8))
    return whole


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _exchange(value: Any, group: Group, device: torch.device) -> list[Any]:
    """What every rank of the group gave, as JSON, in rank order."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    with group.ledger.about("assembly"):
        sizes = torch.empty(group.size, dtype=torch.int64, device=device)
        group.all_gather(sizes, torch.tensor([len(data)], device=device))
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        padded[: len(data)] = data.to(device)
        all_data = torch.empty(group.size, longest, dtype=torch.uint8, device=device)
        group.all_gather(all_data, padded)
    return [
        json.loads(bytes(row[:size].tolist())) for row, size in zip(all_data, sizes.tolist(), strict=True)
    ]
