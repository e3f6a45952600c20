"""The entries and exits of a split layer, as nodes of autograd's graph, and the collectives that they are.

`regions` shows which. Moves do them: of a group at once, or as operators that torch.compile records
(`run_in_graph`).
"""

import itertools
import weakref
from functools import cache, partial
from typing import Any, Literal, NamedTuple, final
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from echelon.collectives import Group, Handle
from echelon.collectives.agreement import gather_rows
from echelon.errors import UserError
from echelon.nn.losses import VocabularyPart
from echelon.nn.tracing import untraced

_SUBJECT = "tensor parallelism"


@final
class GroupMoves:
    """The moves of one group, done at once: it gathers parts and sums over its ranks."""

    in_place = True  # a sum may overwrite its input

    def __init__(self, group: Group) -> None:
        self._group, self.ranks, self.rank = group, group.size, group.rank

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        return gathered(x, self._group, dim)

    def summed(self, x: Tensor) -> Tensor:
        """The sum over ranks, in the memory of `x` if that is contiguous."""
        return start_sum(x, self._group, wait=True)[0]

    def summed_part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part, along `dim`, of the sum over ranks."""
        return start_sum_of_part(x, self._group, dim, wait=True)[0]


@untraced
def gathered(x: Tensor, group: Group, dim: int) -> Tensor:
    """The parts of all ranks, one after the other along `dim`."""
    return gather_rows(x, group, _SUBJECT).movedim(0, dim).flatten(dim, dim + 1)


def start_sum(x: Tensor, group: Group, *, wait: bool = False) -> tuple[Tensor, Handle]:
    """Start to sum over ranks: the tensor that will hold the sum, and what to wait for."""
    x = x.contiguous()
    with group.ledger.about(_SUBJECT):
        return x, group.all_reduce(x, wait=wait)


def start_sum_of_part(x: Tensor, group: Group, dim: int = 1, *, wait: bool = False) -> tuple[Tensor, Handle]:
    """Start to sum over ranks: the tensor that will hold this rank's part, and what to wait for."""
    check_divisible(x, group.size, dim)
    parts = x.unflatten(dim, (group.size, -1)).movedim(dim, 0).contiguous()
    part = torch.empty_like(parts[0])
    with group.ledger.about(_SUBJECT):
        return part, group.reduce_scatter(part, parts, wait=wait)


def vocabulary_part(columns: int, group: Group, vocabulary: int) -> VocabularyPart:
    """Describe this rank's `columns` of logits, of so many in all without padding."""
    gather = partial(gather_rows, group=group, subject="loss")
    return VocabularyPart(columns * group.rank, min(vocabulary, columns * group.size), gather)


def check_divisible(x: Tensor, ranks: int, dim: int) -> None:
    if x.shape[dim] % ranks:
        raise UserError(
            f"sequence=true tensor={ranks}: a sequence of {x.shape[dim]} is not divisible by "
            f"{ranks}; use sequences of a multiple of {ranks}, or sequence=false"
        )


# The same as operators that torch.compile records, since it cannot trace into collectives.
#
# Ranks that compile the same layer record the same operators in the same order. All engines of a process
# share compiled code, so a group comes as data: its number, a tensor in host memory.


# Compiled code outlives an engine and must not keep its groups alive.
_groups: WeakValueDictionary[int, Group] = WeakValueDictionary()
_numbers: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
_next_number = itertools.count()


def number_of(group: Group) -> Tensor:
    """By which the operators know the group."""
    if group not in _numbers:
        _numbers[group] = number = next(_next_number)
        _groups[number] = group
    return torch.tensor(_numbers[group])


@final
class RecordedMoves:
    """The moves of `GroupMoves`, as operators: none changes its input."""

    in_place = False

    def __init__(self, number: Tensor, ranks: int, rank: int) -> None:
        self._number, self.ranks, self.rank = number, ranks, rank

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        result: Tensor = gather_parts(x, self._number, self.ranks, dim)
        return result

    def summed(self, x: Tensor) -> Tensor:
        result: Tensor = sum_over_ranks(x, self._number)
        return result

    def summed_part(self, x: Tensor, dim: int) -> Tensor:
        check_divisible(x, self.ranks, dim)
        result: Tensor = sum_part_over_ranks(x, self._number, self.ranks, dim)
        return result


Moves = GroupMoves | RecordedMoves


@torch.library.custom_op("echelon::gather_parts", mutates_args=())
def gather_parts(x: Tensor, group: Tensor, ranks: int, dim: int) -> Tensor:  # noqa: ARG001
    return gathered(x, _group(group), dim).contiguous()


@torch.library.custom_op("echelon::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor, group: Tensor) -> Tensor:
    """The sum over ranks, in new memory."""
    return GroupMoves(_group(group)).summed(x.clone(memory_format=torch.contiguous_format))


@torch.library.custom_op("echelon::sum_part_over_ranks", mutates_args=())
def sum_part_over_ranks(x: Tensor, group: Tensor, ranks: int, dim: int) -> Tensor:  # noqa: ARG001
    return GroupMoves(_group(group)).summed_part(x, dim).contiguous()


@torch.library.custom_op("echelon::checked_tokens", mutates_args=())
def checked_tokens(tokens: Tensor, vocabulary: int) -> Tensor:
    """A copy of tokens on the host, checked by reading them, which torch.compile cannot record."""
    check_tokens(tokens, vocabulary)
    return tokens.clone()


def check_tokens(tokens: Tensor, vocabulary: int) -> None:
    low, high = int(tokens.min()), int(tokens.max())
    if not 0 <= low <= high < vocabulary:
        raise IndexError(f"tokens {low} … {high} of a vocabulary of {vocabulary}")


def _group(number: Tensor) -> Group:
    group = _groups.get(int(number))
    if group is None:
        raise RuntimeError(
            "a compiled layer communicates, and the group of its engine is gone; make a new engine"
        )
    return group


@gather_parts.register_fake
def _(x: Tensor, group: Tensor, ranks: int, dim: int) -> Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :])


@sum_over_ranks.register_fake
def _(x: Tensor, group: Tensor) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape)


@sum_part_over_ranks.register_fake
def _(x: Tensor, group: Tensor, ranks: int, dim: int) -> Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:dim], x.shape[dim] // ranks, *x.shape[dim + 1 :])


@checked_tokens.register_fake
def _(tokens: Tensor, vocabulary: int) -> Tensor:  # noqa: ARG001
    return torch.empty_like(tokens)


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
