"""What happens at the entries and exits of a split layer, as nodes of autograd's graph.

Which collectives these are, `regions` shows. Moves do them: of a group at once, or as operators that
torch.compile records.
"""

import weakref
from typing import Any, Protocol, final

import torch
from torch import Tensor

from echelon.parallel.tensor.moves import check_divisible


class Moves(Protocol):
    """Gathers parts and sums over the ranks of a group. `in_place`: a sum may overwrite its input."""

    ranks: int
    rank: int
    in_place: bool

    def gathered(self, x: Tensor, dim: int) -> Tensor: ...
    def summed(self, x: Tensor) -> Tensor: ...
    def summed_part(self, x: Tensor, dim: int) -> Tensor: ...


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


class _Join(_AlongDim):
    @staticmethod
    def forward(x: Tensor, moves: Moves, dim: int) -> Tensor:
        return moves.gathered(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None, None
        if torch.is_grad_enabled():
            return _call(_Part, gradient, ctx.moves, ctx.dim), None, None
        return gradient.chunk(ctx.moves.ranks, ctx.dim)[ctx.moves.rank], None, None
