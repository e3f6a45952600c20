"""The entries and exits of the split part of a layer, where the ranks of a group communicate.

        hidden states ──enter──> column · row ──leave──> hidden states

Without sequence parallelism, hidden states are whole on every rank:
    enter   forward: nothing                     backward: all-reduce of the gradients
    leave   forward: all-reduce                  backward: nothing

With it, every rank has a part of the sequence (dim 1), and the same bytes are sent:
    enter   forward: all-gather                  backward: reduce-scatter
    leave   forward: reduce-scatter              backward: all-gather
    part    forward: take this rank's part       backward: all-gather
"""

import weakref
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from echelon.collectives import Group
from echelon.tensor_parallel.columns import SharedInput
from echelon.tensor_parallel.moves import check_divisible, gathered, summed, summed_part
from echelon.tracing import untraced


@final
class Region:
    """The split parts of a model's layers. `sequence`: hidden states between them are split along it."""

    def __init__(self, group: Group, *, sequence: bool) -> None:
        self.group, self.sequence = group, sequence
        self.overlaps = False  # whether sums of gradients run while gradients of weights are computed
        self.shared_input = SharedInput()
        self._last = _LastEntry()

    @untraced
    def enter(self, x: Tensor, *, dim: int | None = 1, to_matrices: bool = False) -> Tensor:
        """The input of a split module. `dim` counts positions; None: every rank has all of them.

        `to_matrices`: it is only multiplied by matrices. Their gradients are in new memory, so that the sum
        can be computed in place. Other operations may pass back memory that is used elsewhere too.

        Modules with the same hidden states as input (query, key, value) share one entry, and so one sum.
        """
        if self.has_entered(x):
            return x
        key = (x._version, torch.is_grad_enabled(), dim, to_matrices)
        entered = self._last.find(x, key)
        if entered is None:
            split = self.sequence and dim is not None
            entered = (
                _call(_Gather, x, self.group, dim) if split else _call(_Enter, x, self.group, to_matrices)
            )
            self._last.keep(x, key, entered)
        return entered

    def has_entered(self, x: Tensor) -> bool:
        """Whether `x` is the result of an entry, by the module around the one that has it as input."""
        return self._last.is_entered(x)

    @untraced
    def leave(self, x: Tensor, *, dim: int | None = 1) -> Tensor:
        """The sum over ranks of the outputs of a split module. It may overwrite `x`."""
        split = self.sequence and dim is not None
        return _call(_Scatter, x, self.group, dim) if split else _call(_Leave, x, self.group)

    @untraced
    def part(self, x: Tensor) -> Tensor:
        """This rank's part of a sequence that every rank has whole."""
        return _call(_Part, x, self.group, 1)

    @untraced
    def join_logits(self, logits: Tensor) -> Tensor:
        """All logits, from every rank's part of the vocabulary, for a loss that all ranks compute."""
        return _call(_Join, logits, self.group)


class _LastEntry:
    """The last entry, kept for as long as its source is alive. A copy starts without one."""

    def __init__(self) -> None:
        self._source: weakref.ref[Tensor] | None = None
        self._key: tuple[object, ...] = ()
        self._entered: Tensor | None = None

    def find(self, x: Tensor, key: tuple[object, ...]) -> Tensor | None:
        is_source = self._source is not None and self._source() is x
        return self._entered if is_source and self._key == key else None

    def is_entered(self, x: Tensor) -> bool:
        return self._entered is x

    def keep(self, x: Tensor, key: tuple[object, ...], entered: Tensor) -> None:
        self._source, self._key, self._entered = weakref.ref(x, self._forget), key, entered

    def _forget(self, source: "weakref.ref[Tensor]") -> None:
        if self._source is source:
            self._source, self._entered = None, None

    def __reduce__(self) -> tuple[type["_LastEntry"], tuple[()]]:
        return _LastEntry, ()


def _call(function: Any, *arguments: object) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


# In all of these, no gradient in means no gradient out. That must be so on all ranks or on none.


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, fresh: bool) -> Tensor:
        ctx.group, ctx.fresh = group, fresh
        ctx.set_materialize_grads(False)
        return x.detach()  # not a view: a view would keep its source alive, and `_LastEntry` with it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None, None
        own = gradient if ctx.fresh else gradient.clone(memory_format=torch.contiguous_format)
        return summed(own, ctx.group), None, None


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


class _AlongDim(torch.autograd.Function):
    """The backward pass needs only the group and the dim."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Group, int], output: Tensor) -> None:  # noqa: ARG004
        _, ctx.group, ctx.dim = inputs
        ctx.set_materialize_grads(False)


class _Gather(_AlongDim):
    @staticmethod
    def forward(x: Tensor, group: Group, dim: int) -> Tensor:
        return gathered(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        part = None if gradient is None else summed_part(gradient, ctx.group, ctx.dim)
        return part, None, None


class _GatherBackward(_AlongDim):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        whole = None if gradient is None else gathered(gradient, ctx.group, ctx.dim)
        return whole, None, None


class _Scatter(_GatherBackward):
    @staticmethod
    def forward(x: Tensor, group: Group, dim: int) -> Tensor:
        return summed_part(x, group, dim)


class _Part(_GatherBackward):
    @staticmethod
    def forward(x: Tensor, group: Group, dim: int) -> Tensor:
        check_divisible(x, group, dim)
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
        part = None if gradient is None else gradient.chunk(ctx.group.size, -1)[ctx.group.rank]
        return part, None
