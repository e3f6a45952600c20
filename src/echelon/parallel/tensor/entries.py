"""The entries and exits of a split layer, as nodes of autograd's graph.

Which collectives these are, `regions` shows. Moves do them: of a group at once, or as operators that
torch.compile records (`run_in_graph`).
"""

import weakref
from functools import cache
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.parallel.tensor.moves import Moves, RecordedMoves, check_divisible, number_of

Way = Literal["enter", "leave", "total", "join_logits"]  # the methods of `Entries` that graphs record


@final
class Entries:
    """The ways into and out of the split parts of layers; `last` remembers the last way in."""

    def __init__(self, moves: Moves, last: "LastEntry", *, sequence: bool) -> None:
        self._moves, self._last, self._sequence = moves, last, sequence

    def enter(self, x: Tensor, dim: int | None, to_matrices: bool) -> Tensor:
        """Modules with the same hidden states (query, key, value) share one entry, and so one sum."""
        key = (x._version, torch.is_grad_enabled(), dim, to_matrices, self._sequence)
        entered = self._last.find(x, key)
        if entered is None:
            split = self._sequence and dim is not None
            entered = (
                _call(_Gather, x, self._moves, dim) if split else _call(_Enter, x, self._moves, to_matrices)
            )
            self._last.keep(x, key, entered)
        return entered

    def leave(self, x: Tensor, dim: int | None) -> Tensor:
        split = self._sequence and dim is not None
        return _call(_Scatter, x, self._moves, dim) if split else _call(_Leave, x, self._moves)

    def total(self, x: Tensor) -> Tensor:
        return _call(_Total, x, self._moves)

    def part(self, x: Tensor) -> Tensor:
        return _call(_Part, x, self._moves, 1)

    def join_logits(self, logits: Tensor) -> Tensor:
        return _call(_Join, logits, self._moves, logits.ndim - 1)

    def run(self, way: Way, x: Tensor, *arguments: Any) -> Tensor:
        result: Tensor = getattr(self, way)(x, *arguments)
        return result


class LastEntry:
    """The last entry, kept for as long as its source is alive. A copy starts without one."""

    def __init__(self) -> None:
        self._source: weakref.ref[Tensor] | None = None
        self._key: tuple[object, ...] = ()
        self._entered: Tensor | None = None

    def find(self, x: Tensor, key: tuple[object, ...]) -> Tensor | None:
        is_source = self._source is not None and self._source() is x
        return self._entered if is_source and self._key == key else None

    def keep(self, x: Tensor, key: tuple[object, ...], entered: Tensor) -> None:
        self._source, self._key, self._entered = weakref.ref(x, self._forget), key, entered

    def _forget(self, source: "weakref.ref[Tensor]") -> None:
        if self._source is source:
            self._source, self._entered = None, None

    def __reduce__(self) -> tuple[type["LastEntry"], tuple[()]]:
        return LastEntry, ()


def _call(function: Any, *arguments: object) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


# In all of these, no gradient in means no gradient out. That must be so on all ranks or on none.
#
# A backward pass that is itself differentiated (create_graph=True) is made of the others: `enter` and `leave`
# are each other's, `_Gather` and `_Scatter`, `_Part` and `_Join`.


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: Moves, fresh: bool) -> Tensor:
        ctx.moves, ctx.fresh = moves, fresh
        ctx.set_materialize_grads(False)
        return x.detach()  # not a view: a view would keep its source alive, and `LastEntry` with it

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None, None
        if torch.is_grad_enabled():
            return _call(_Leave, gradient.clone(), ctx.moves), None, None
        may_overwrite = ctx.fresh or not ctx.moves.in_place
        own = gradient if may_overwrite else gradient.clone(memory_format=torch.contiguous_format)
        return ctx.moves.summed(own), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: Moves) -> Tensor:
        ctx.moves = moves
        ctx.set_materialize_grads(False)
        if moves.in_place and x.is_contiguous():
            ctx.mark_dirty(x)
        return moves.summed(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is not None and torch.is_grad_enabled():
            return _call(_Enter, gradient, ctx.moves, False), None
        return gradient, None


class _Total(torch.autograd.Function):
    """Every rank goes on with the sum, so its gradient is a sum too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: Moves) -> Tensor:
        ctx.moves = moves
        ctx.set_materialize_grads(False)
        return moves.summed(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return None if gradient is None else _call(_Total, gradient, ctx.moves), None


class _AlongDim(torch.autograd.Function):
    """The backward pass needs only the moves and the dim."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Moves, int], output: Tensor) -> None:  # noqa: ARG004
        _, ctx.moves, ctx.dim = inputs
        ctx.set_materialize_grads(False)


class _Gather(_AlongDim):
    @staticmethod
    def forward(x: Tensor, moves: Moves, dim: int) -> Tensor:
        return moves.gathered(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return None if gradient is None else _call(_Scatter, gradient, ctx.moves, ctx.dim), None, None


class _Scatter(_AlongDim):
    @staticmethod
    def forward(x: Tensor, moves: Moves, dim: int) -> Tensor:
        return moves.summed_part(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return None if gradient is None else _call(_Gather, gradient, ctx.moves, ctx.dim), None, None


class _Part(_AlongDim):
    @staticmethod
    def forward(x: Tensor, moves: Moves, dim: int) -> Tensor:
        check_divisible(x, moves.ranks, dim)
        return x.chunk(moves.ranks, dim)[moves.rank].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return None if gradient is None else _call(_Join, gradient, ctx.moves, ctx.dim), None, None


class _Join(_Gather):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None, None
        if torch.is_grad_enabled():
            return _call(_Part, gradient, ctx.moves, ctx.dim), None, None
        return gradient.chunk(ctx.moves.ranks, ctx.dim)[ctx.moves.rank], None, None


# The entries and exits of a split layer inside the graphs of torch.compile.
#
# torch records a function that is allowed in a graph as one node, and then runs it on tensors without memory
# to find the operators and their gradients. So the code is the same, with collectives that are operators; and
# modules with the same hidden states share an entry there as they do elsewhere.
#
# All engines of a process share compiled code, and a method of an engine's object would be recorded as a
# constant. So this is a function of the module, and the group is data.


_last = LastEntry()  # of the graph that is being recorded


class RecordedGroup(NamedTuple):
    number: Tensor
    ranks: int
    rank: int

    @classmethod
    def of(cls, group: Group) -> "RecordedGroup":
        _allow_in_graph()
        return cls(number_of(group), group.size, group.rank)


def run_in_graph(
    x: Tensor, number: Tensor, ranks: int, rank: int, sequence: bool, way: Way, *arguments: Any
) -> Tensor:
    """Run `way` of entries whose collectives are operators of the graph."""
    entries = Entries(RecordedMoves(number, ranks, rank), _last, sequence=sequence)
    return entries.run(way, x, *arguments)


@cache
def _allow_in_graph() -> None:
    """Not when this is imported: it imports the compiler, which takes seconds."""
    torch.compiler.allow_in_graph(run_in_graph)
