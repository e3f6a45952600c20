"""The entries and exits of the split part of a layer, where the ranks of a group communicate.

        hidden states ──enter──> column · row ──leave──> hidden states

Without sequence parallelism, hidden states are whole on every rank:
    enter   forward: nothing                     backward: all-reduce of the gradients
    leave   forward: all-reduce                  backward: nothing
    total   forward: all-reduce                  backward: all-reduce, for sums inside the split part

With it, every rank has a part of the sequence (dim 1), and the same bytes are sent:
    enter   forward: all-gather                  backward: reduce-scatter
    leave   forward: reduce-scatter              backward: all-gather
    part    forward: take this rank's part       backward: all-gather
"""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.collectives import Group
from echelon.errors import UserError
from echelon.nn.autograd.leaves import product
from echelon.nn.autograd.saved_tensors import is_recorded
from echelon.nn.autograd.second_run import once
from echelon.nn.tracing import untraced
from echelon.parallel.tensor import entries

if TYPE_CHECKING:
    from echelon.parallel.tensor.modules import Column


@final
class Region:
    """The split parts of a model's layers. `sequence`: hidden states between them are split along it."""

    def __init__(self, group: Group, *, sequence: bool) -> None:
        self.group, self.sequence = group, sequence
        self.overlaps = False  # whether sums of gradients run while gradients of weights are computed
        self.shared_input = SharedInput()
        # What the module that runs now was given: it has entered before that module. torch.compile follows
        # this through the pieces of a layer that it cannot record as one graph.
        self.entered: Tensor | None = None
        self._entries = entries.Entries(entries.GroupMoves(group), entries.LastEntry(), sequence=sequence)
        self._recorded_group: entries.RecordedGroup | None = None

    def prepare_compiling(self) -> None:
        """Let torch.compile record what happens here, where it would stop."""
        if self._recorded_group is None:
            self._recorded_group = entries.RecordedGroup.of(self.group)

    def enter(self, x: Tensor, *, dim: int | None = 1, to_matrices: bool = False) -> Tensor:
        """The input of a split module. `dim` counts positions; None: every rank has all of them.

        `to_matrices`: it is only multiplied by matrices. Their gradients are in new memory, so that the sum
        can be computed in place. Other operations may pass back memory that is used elsewhere too.
        """
        if x is self.entered:
            return x
        return self._run("enter", x, dim, to_matrices)

    def leave(self, x: Tensor, *, dim: int | None = 1) -> Tensor:
        """The sum over ranks of the outputs of a split module. It may overwrite `x`."""
        return self._run("leave", x, dim)

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks of what each computes from its own part, for all of them to go on with."""
        return self._run("total", x)

    @untraced
    def part(self, x: Tensor) -> Tensor:
        """This rank's part of a sequence that every rank has whole."""
        return self._entries.part(x)

    def join_logits(self, logits: Tensor) -> Tensor:
        """All logits, from every rank's part of the vocabulary, for a loss that all ranks compute."""
        return self._run("join_logits", logits)

    def _run(self, way: entries.Way, x: Tensor, *arguments: Any) -> Tensor:
        if self._recorded_group is not None and torch.compiler.is_compiling():
            return entries.run_in_graph(x, *self._recorded_group, self.sequence, way, *arguments)
        return self._run_untraced(way, x, *arguments)

    @untraced
    def _run_untraced(self, way: entries.Way, x: Tensor, *arguments: Any) -> Tensor:
        return self._entries.run(way, x, *arguments)

    def __getstate__(self) -> dict[str, object]:
        # a copy of the group has another number
        return self.__dict__ | {"_recorded_group": None, "entered": None}


# Columns of one input as one autograd node: the sum of the input's gradient runs behind other work.
#
#                         gradients of the outputs of query, key, value
#                                           │
#     rank's own work     input's gradient ─┴─ weights' gradients ─────── wait
#     between ranks                        └─ sum ──────────────────────┘
#
# Autograd would finish one matrix after the other, and start the sum after the last. Here all matrices with
# the same input are one node of the graph, which computes the gradient of the input first.


class Matrix(NamedTuple):
    """A module that multiplies by its weight. `transposed`: the weight is stored as [inputs, outputs]."""

    module: nn.Module
    transposed: bool


def can_share(x: Tensor) -> bool:
    """Return whether the products with `x` may be one node.

    `x` must belong to this forward pass. And nothing may record what autograd saves in order to compute it
    again (recompute): the first pass, where the sharing is not known yet, saves something else.
    """
    if not torch.is_grad_enabled() or x.grad_fn is None or x.ndim < 2 or x.is_complex():
        return False
    return not is_recorded() and not torch.is_autocast_enabled(x.device.type)


@final
class SharedInput:
    """The matrices that have the same input: the first call of a pass computes the products of all of them.

    In the first pass every matrix is on its own, because only then it is seen which ones share an input. All
    ranks make the same calls, so all ranks come to the same answer. A layer that runs again in the backward
    pass computes the products that it has computed together in the forward pass, and learns nothing.
    """

    def __init__(self) -> None:
        self.learned: dict[Column, list[Column]] = {}  # by the first one that is called
        self._input: weakref.ref[Tensor] | None = None
        self._version = 0
        self._first: Column | None = None
        self._expected: list[Column] = []  # whose products were computed, and not yet asked for
        self._products: dict[Column, Tensor] = {}

    def multiply(self, caller: "Column", x: Tensor, group: Group, *, sequence: bool) -> Tensor | None:
        """The product with the caller's matrix; None where it is not known yet which matrices share `x`."""
        together = once(lambda: self._choose(caller, x))
        if together:
            products = _multiply(x, group, sequence, [sharer.matrix for sharer in together])
            self._products = dict(zip(together, products, strict=True))
        return None if together is None else self._products.pop(caller)

    def _choose(self, caller: "Column", x: Tensor) -> "list[Column] | None":
        """Return the products to compute now: none if the caller's is there; None: it is on its own."""
        if self._input is None or self._input() is not x or self._version != x._version:
            self._start(caller, x)
            if caller not in self.learned:
                self.learned[caller] = [caller]
                return None
            self._expected = [sharer for sharer in self.learned[caller] if sharer is not caller]
            return list(self.learned[caller])
        if caller in self._expected:
            self._expected.remove(caller)
            return []
        assert self._first is not None
        if caller not in self.learned[self._first] and caller.layer == self._first.layer:
            self.learned[self._first].append(caller)
        return None

    def _start(self, caller: "Column", x: Tensor) -> None:
        for absent in self._expected:  # they were not called this time
            assert self._first is not None
            self.learned[self._first].remove(absent)
        self._input, self._version, self._first = weakref.ref(x), x._version, caller
        self._expected, self._products = [], {}

    def __reduce__(self) -> tuple[type["SharedInput"], tuple[()]]:
        return SharedInput, ()  # a copy of a model has other matrices


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
        ctx: Any, x: Tensor, group: Group, sequence: bool, transposed: list[bool], *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[: len(transposed)], parameters[len(transposed) :]
        entered = entries.gathered(x, group, 1) if sequence else x
        ctx.save_for_backward(entered, *weights)
        ctx.group, ctx.sequence, ctx.transposed = group, sequence, transposed
        ctx.set_materialize_grads(False)
        return tuple(
            product(entered, weight.T if turned else weight, bias)
            for weight, bias, turned in zip(weights, biases, transposed, strict=True)
            if weight is not None
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        entered, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():
            entered = _enter_again(entered, ctx.group, sequence=ctx.sequence)
        flat = [None if gradient is None else gradient.flatten(0, -2) for gradient in gradients]
        for_input = _gradient_of_input(flat, weights, ctx.transposed)
        if for_input is None:
            return (None,) * (4 + 2 * len(weights))
        total, wait = _start_sum(for_input.view_as(entered), ctx.group, sequence=ctx.sequence)
        rows, needed = entered.flatten(0, -2), ctx.needs_input_grad[4:]
        for_weights = [
            None if gradient is None or not needs else rows.T @ gradient if turned else gradient.T @ rows
            for gradient, turned, needs in zip(flat, ctx.transposed, needed[: len(weights)], strict=True)
        ]
        for_biases = [
            gradient.sum(0) if gradient is not None and needs else None
            for gradient, needs in zip(flat, needed[len(weights) :], strict=True)
        ]
        wait()
        return total, None, None, None, *for_weights, *for_biases


def _start_sum(for_input: Tensor, group: Group, *, sequence: bool) -> tuple[Tensor, Callable[[], object]]:
    """The sum over ranks, which runs on while gradients of weights are computed, and what waits for it."""
    if torch.is_grad_enabled():
        return _entries(group).leave(for_input.clone(), None), lambda: None
    total, handle = (entries.start_sum_of_part if sequence else entries.start_sum)(for_input, group)
    return total, handle.wait


def _enter_again(entered: Tensor, group: Group, *, sequence: bool) -> Tensor:
    """The input, for gradients that are themselves differentiated (create_graph=True)."""
    if sequence:
        raise UserError(
            "sequence=true: the model or loss differentiates a gradient (torch.autograd.grad with "
            "create_graph=True), and the input of a split layer is not kept for that; use sequence=false"
        )
    return _entries(group).enter(entered, None, to_matrices=False)


def _entries(group: Group) -> entries.Entries:
    return entries.Entries(entries.GroupMoves(group), entries.LastEntry(), sequence=False)


def _gradient_of_input(
    gradients: Sequence[Tensor | None], weights: Sequence[Tensor], transposed: Sequence[bool]
) -> Tensor | None:
    """This rank's part of it: the sum over its matrices; None where no output has a gradient."""
    total: Tensor | None = None
    for gradient, weight, turned in zip(gradients, weights, transposed, strict=True):
        if gradient is not None:
            matrix = weight.T if turned else weight
            total = gradient @ matrix if total is None else total.addmm_(gradient, matrix)
    return total
