"""The ways into and out of the split part of a layer, where the ranks of a group talk.

        hidden states ──enter──> column · row ──leave──> hidden states

without sequence parallelism: hidden states are whole on every rank,
    enter   forward: nothing            backward: sum of the gradients
    leave   forward: sum                backward: nothing

with it, every rank has a part of the sequence (dim 1), and the same bytes are moved,
    enter   forward: gather             backward: sum, of which each keeps its part
    leave   forward: the same sum       backward: gather
    part    forward: take this rank's   backward: gather
"""

import weakref
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from echelon.collectives import Group
from echelon.tensor_parallel.columns import SharedInput
from echelon.tensor_parallel.moves import check_divides, gathered, summed, summed_part
from echelon.tracing import untraced


@final
class Region:
    """The split parts of a model's layers. `sequence`: hidden states between them are split along it."""

    def __init__(self, group: Group, *, sequence: bool) -> None:
        self.group, self.sequence = group, sequence
        self.overlaps = False  # whether sums of gradients may go on while weights' gradients are computed
        self.shared_input = SharedInput()
        self._last = _Last()

    @untraced
    def enter(self, x: Tensor, *, dim: int | None = 1, to_matrices: bool = False) -> Tensor:
        """What a split module works on. `dim` counts positions; None: each rank has them all.

        `to_matrices`: it is multiplied by matrices and nothing else. They make their gradients anew, so that
        the sum can take place in that memory. What others pass back may be somebody else's too.

        Modules that are given the same hidden states (query, key, value) share one way in, and so one sum.
        """
        if self.has_entered(x):
            return x
        key = (x._version, torch.is_grad_enabled(), dim, to_matrices)
        entered = self._last.made_from(x, key)
        if entered is None:
            split = self.sequence and dim is not None
            entered = (
                _call(_Gather, x, self.group, dim) if split else _call(_Enter, x, self.group, to_matrices)
            )
            self._last.keep(x, key, entered)
        return entered

    def has_entered(self, x: Tensor) -> bool:
        """Whether the module around the one that is given `x` has entered with it."""
        return self._last.is_made(x)

    @untraced
    def leave(self, x: Tensor, *, dim: int | None = 1) -> Tensor:
        """The sum over ranks of what a split module made; `x` is used up."""
        split = self.sequence and dim is not None
        return _call(_Scatter, x, self.group, dim) if split else _call(_Leave, x, self.group)

    @untraced
    def part(self, x: Tensor) -> Tensor:
        """This rank's part of a sequence that all ranks have whole."""
        return _call(_Part, x, self.group, 1)

    @untraced
    def join_logits(self, logits: Tensor) -> Tensor:
        """All logits, from every rank's part of the vocabulary, for a loss that every rank computes."""
        return _call(_Join, logits, self.group)


class _Last:
    """The way in that was made last, for as long as what went in is there. Copies of it start with none."""

    def __init__(self) -> None:
        self._source: weakref.ref[Tensor] | None = None
        self._key: tuple[object, ...] = ()
        self._entered: Tensor | None = None

    def made_from(self, x: Tensor, key: tuple[object, ...]) -> Tensor | None:
        same = self._source is not None and self._source() is x
        return self._entered if same and self._key == key else None

    def is_made(self, x: Tensor) -> bool:
        return self._entered is x

    def keep(self, x: Tensor, key: tuple[object, ...], entered: Tensor) -> None:
        self._source, self._key, self._entered = weakref.ref(x, self._forget), key, entered

    def _forget(self, source: "weakref.ref[Tensor]") -> None:
        if self._source is source:
            self._source, self._entered = None, None

    def __reduce__(self) -> tuple[type["_Last"], tuple[()]]:
        return _Last, ()


def _call(function: Any, *arguments: object) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


# In all of these: where no gradient comes, there is none. That must be so on all ranks or on none.


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, fresh: bool) -> Tensor:
        ctx.group, ctx.fresh = group, fresh
        ctx.set_materialize_grads(False)
        return x.detach()  # no view: `_Last` would keep what it is a view of, and so itself

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None, None
        mine = gradient if ctx.fresh else gradient.clone(memory_format=torch.contiguous_format)
        return summed(mine, ctx.group), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.set_materialize_grads(False)
        if x.is_contiguous():
            ctx.mark_dirty(x)
        return summed(x, group)

    @staticmethod
    def backward(_: FunctionCtx, gradient: Tensor | None) -> Any:
        return gradient, None


class _Kept(torch.autograd.Function):
    """Where the way back needs the group and the dim alone."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Group, int], output: Tensor) -> None:  # noqa: ARG004
        _, ctx.group, ctx.dim = inputs
        ctx.set_materialize_grads(False)


class _Gather(_Kept):
    @staticmethod
    def forward(x: Tensor, group: Group, dim: int) -> Tensor:
        return gathered(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        mine = None if gradient is None else summed_part(gradient, ctx.group, ctx.dim)
        return mine, None, None


class _GatheredBack(_Kept):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        whole = None if gradient is None else gathered(gradient, ctx.group, ctx.dim)
        return whole, None, None


class _Scatter(_GatheredBack):
    @staticmethod
    def forward(x: Tensor, group: Group, dim: int) -> Tensor:
        return summed_part(x, group, dim)


class _Part(_GatheredBack):
    @staticmethod
    def forward(x: Tensor, group: Group, dim: int) -> Tensor:
        check_divides(x, group, dim)
        return x.chunk(group.size, dim)[group.rank].clone()


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return gathered(x, group, x.ndim - 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        mine = None if gradient is None else gradient.chunk(ctx.group.size, -1)[ctx.group.rank]
        return mine, None
