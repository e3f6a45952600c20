"""Columns in one piece: the sum of their input's gradient goes on while those of their weights are computed.

                        gradients of the outputs of query, key, value
                                          │
    rank's own work     input's gradient ─┴─ weights' gradients ─────── wait
    between ranks                        └─ sum ──────────────────────┘

Autograd computes what belongs to one matrix at once, and begins the sum when all matrices are through. Here
all that are given the same hidden states are one node of the graph.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from echelon.collectives import Group
from echelon.products import product
from echelon.tensor_parallel.moves import gathered, start_sum, start_sum_of_part


class Matrix(NamedTuple):
    """A module that multiplies. `transposed`: its weight is stored as [inputs, outputs]."""

    module: nn.Module
    transposed: bool


class Multiplies(Protocol):
    """Somebody who is given hidden states, to multiply them by a matrix. `layer`: whose weights are there at
    the same time."""

    matrix: Matrix
    layer: int


def can_share(x: Tensor) -> bool:
    """Whether what is computed from `x` may be one node: it is of this pass alone, and nobody takes note of
    what autograd saves in order to compute it again (checkpoint): the first time it would be otherwise."""
    if not torch.is_grad_enabled() or x.grad_fn is None or x.ndim < 2 or x.is_complex():
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    noted = hooks is not None and not getattr(hooks[0], "only_counts", False)
    return not noted and not torch.is_autocast_enabled(x.device.type)


@final
class Companions:
    """Who is given the same hidden states: all those who were the last time are computed by the first call.

    The first time everyone is on its own: only then is it known who shares. What a call says is the same on
    all ranks, and so is what follows from it.
    """

    def __init__(self) -> None:
        self._of: dict[Multiplies, list[Multiplies]] = {}  # by the first of them
        self._given: weakref.ref[Tensor] | None = None
        self._version = 0
        self._first: Multiplies | None = None
        self._made: dict[Multiplies, Tensor] = {}

    def multiply(self, mine: Multiplies, x: Tensor, group: Group, *, sequence: bool) -> Tensor | None:
        """The product with one's matrix; None where it is not known yet who shares `x`."""
        if self._given is None or self._given() is not x or self._version != x._version:
            self._start(mine, x)
            if mine not in self._of:
                self._of[mine] = [mine]
                return None
            together = self._of[mine]
            made = _multiply(x, group, sequence, [each.matrix for each in together])
            self._made = dict(zip(together, made, strict=True))
        if mine in self._made:
            return self._made.pop(mine)
        assert self._first is not None
        if mine not in self._of[self._first] and mine.layer == self._first.layer:
            self._of[self._first].append(mine)
        return None

    def _start(self, mine: Multiplies, x: Tensor) -> None:
        for absent in self._made:
            assert self._first is not None
            self._of[self._first].remove(absent)
        self._given, self._version, self._first, self._made = weakref.ref(x), x._version, mine, {}

    def __reduce__(self) -> tuple[type["Companions"], tuple[()]]:
        return Companions, ()  # a copy of a model has others


def _multiply(x: Tensor, group: Group, sequence: bool, matrices: Sequence[Matrix]) -> tuple[Tensor, ...]:
    weights: list[Any] = [matrix.module.weight for matrix in matrices]
    biases: list[Any] = [matrix.module.bias for matrix in matrices]
    transposed = [matrix.transposed for matrix in matrices]
    function: Any = _Multiply
    products: tuple[Tensor, ...] = function.apply(x, group, sequence, transposed, *weights, *biases)
    return products


class _Multiply(torch.autograd.Function):
    """Enter, then multiply by each of several matrices."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, sequence: bool, transposed: list[bool], *given: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = given[: len(transposed)], given[len(transposed) :]
        entered = gathered(x, group, 1) if sequence else x
        ctx.save_for_backward(entered, *weights)
        ctx.group, ctx.sequence, ctx.transposed = group, sequence, transposed
        ctx.set_materialize_grads(False)
        return tuple(
            product(entered, weight.T if turned else weight, bias)
            for weight, bias, turned in zip(weights, biases, transposed, strict=True)
            if weight is not None
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        entered, *weights = ctx.saved_tensors
        rows = entered.flatten(0, -2)
        came = [None if its is None else its.flatten(0, -2) for its in gradients]
        summed: Tensor | None = None
        for gradient, weight, turned in zip(came, weights, ctx.transposed, strict=True):
            if gradient is not None:
                matrix = weight.T if turned else weight
                summed = gradient @ matrix if summed is None else summed.addmm_(gradient, matrix)
        if summed is None:
            return (None,) * (4 + 2 * len(weights))
        start = start_sum_of_part if ctx.sequence else start_sum
        total, handle = start(summed.view_as(entered), ctx.group)
        needed = ctx.needs_input_grad[4:]
        for_weights = [
            _for_weight(gradient, rows, turned) if gradient is not None and needs else None
            for gradient, turned, needs in zip(came, ctx.transposed, needed[: len(weights)], strict=True)
        ]
        for_biases = [
            gradient.sum(0) if gradient is not None and needs else None
            for gradient, needs in zip(came, needed[len(weights) :], strict=True)
        ]
        handle.wait()
        return total, None, None, None, *for_weights, *for_biases


def _for_weight(gradient: Tensor, rows: Tensor, turned: bool) -> Tensor:
    return rows.T @ gradient if turned else gradient.T @ rows
