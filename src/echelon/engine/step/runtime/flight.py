"""A microbatch in flight through a stage: what its backward pass needs, and nothing else; and its loss.

Of the outputs only the way back is kept: their values are freed when they are sent, or used.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from echelon.engine.step.runtime.message import TALLY, Gradients, Leaf, Spec
from echelon.engine.step.runtime.split_backward import SplitBackward
from echelon.nn.losses import Sum, check_loss, in_float32, root_and_count
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.observer import ForwardPass, LossPass, Observers
from echelon.parallel.padding import LocalTargets
from echelon.update.numbers import Counted, Number


class Value(NamedTuple):
    """The value one stage passes to the next: a structure's description and its tensors, detached."""

    spec: Spec
    tensors: list[Tensor]

    def as_leaves(self) -> list[Tensor]:
        """The tensors, ready to collect the gradients that they want."""
        return [
            tensor.detach().requires_grad_(leaf.wants_gradient and torch.is_grad_enabled())
            for tensor, leaf in zip(self.tensors, self.spec.leaves, strict=True)
        ]


@dataclass
class Flight:
    """One microbatch between the forward and the backward of one stage.

    `inputs` are the leaves that want a gradient and `outputs` the ways back from what wants one; the leaves
    beside them are their forms.
    """

    inputs: list[Tensor] = field(default_factory=list)
    input_leaves: list[Leaf] = field(default_factory=list)
    outputs: list[GradientEdge] = field(default_factory=list)
    output_leaves: list[Leaf] = field(default_factory=list)
    is_hooked: bool = False  # whether tensors of the forward have hooks
    split: SplitBackward | None = None

    def leave(self, output: Any) -> Value:
        """The forward is over: keep the way back, and return what the next stage gets."""
        spec, tensors = Spec.of(output)
        wants = [leaf.wants_gradient for leaf in spec.leaves]
        self.outputs = [
            get_gradient_edge(tensor) for tensor, wanting in zip(tensors, wants, strict=True) if wanting
        ]
        self.output_leaves = wanted(spec.leaves)
        return Value(spec, [tensor.detach() for tensor in tensors])

    def leave_with_loss(self, loss: Tensor) -> None:
        """The forward of the last stage is over."""
        if loss.requires_grad:
            self.outputs = [get_gradient_edge(loss)]

    def known(self, gradients: Gradients) -> tuple[list[GradientEdge], list[Tensor]]:
        """The outputs whose gradient is there, and these gradients."""
        pairs = [(edge, g) for edge, g in zip(self.outputs, gradients.tensors, strict=True) if g is not None]
        return [edge for edge, _ in pairs], [gradient for _, gradient in pairs]

    def take_gradients(self) -> list[Tensor | None]:
        """Return the gradients of the inputs, and clear them there."""
        gradients = [tensor.grad for tensor in self.inputs]
        for tensor in self.inputs:
            tensor.grad = None
        return gradients


def run_backward(outputs: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Do what `torch.autograd.backward` does with gradients that have the shapes of the outputs: to compare
    these takes it a fifth of the pass of a small layer."""
    _engine_run_backward(
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def wanted(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return the leaves that want a gradient."""
    return [leaf for leaf in leaves if leaf.wants_gradient]


# A microbatch, as the stages of a rank may need it.


class MicrobatchLoss(NamedTuple):
    """The loss of a microbatch. `root` is what the user's function has returned, and root · factors is its
    total; `counted` is how much that is the total of. `normaliser` is what to divide it by before the
    backward pass: the count of its update, as far as it is known, by the loss scale. In an evaluation 1, or 0
    for a sum, which is not divided."""

    root: Tensor
    factors: tuple[Number, ...]
    counted: Number
    normaliser: Number

    def total(self, root: Tensor) -> Tensor:
        """The total, of this root with or without its graph."""
        total = in_float32(root)
        for factor in self.factors:
            total = total * factor
        return total

    def sums(self, *, deferred: bool) -> tuple[Number, Number, Number]:
        """Return total, count, and count times normaliser, without the graph; on the host, unless `deferred`:
        there a product costs a twentieth of an operation of torch."""
        if deferred:
            counted, normaliser = _detached(self.counted), _detached(self.normaliser)
            return self.total(self.root.detach()), counted, counted * normaliser
        total, counted = self.root.item(), _on_host(self.counted)
        for factor in self.factors:
            total *= _on_host(factor)
        return total, counted, counted * _on_host(self.normaliser)

    def divisor(self, total: torch.dtype) -> Number:
        """The normaliser for a total of this type: a float64 on the device would make gradients so."""
        normaliser = self.normaliser
        return normaliser.to(total) if isinstance(normaliser, Tensor) else normaliser


class Microbatch(NamedTuple):
    """One microbatch as a stage may need it.

    `form` names the shapes and types of its inputs, the same on all ranks; `scope` opens its place in the
    training; `normaliser` knows the counts of all losses of its step, which are multiplied by `loss_scale`.
    """

    inputs: Any
    targets: Any
    weight: int
    form: str
    scope: Callable[[], AbstractContextManager[None]] = nullcontext
    normaliser: Any = None
    loss_scale: Number = 1.0


@final
class Losses:
    """Calls the user's loss without padding, and says what it is divided by before the backward pass."""

    def __init__(self, layers: LayerSharding, observers: Observers, *, deferred: bool) -> None:
        """`deferred`: numbers stay on the device."""
        self._layers, self._observers, self._deferred = layers, observers, deferred
        # Whether losses are this rank's to count: those along `tensor` compute the same.
        self.are_counted = layers.counts_loss

    def deferring(self) -> AbstractContextManager[None] | None:
        """Around the forward of the last stage: logits may wait for the loss."""
        return self._layers.deferring(trains=torch.is_grad_enabled())

    def of(self, output: Any, microbatch: Microbatch, forward: ForwardPass) -> MicrobatchLoss:
        targets: LocalTargets = microbatch.targets
        with self._observers.around("around_loss", forward):
            seen = self._layers.without_padding(output, targets)
            result = self._layers.loss(*seen)
        check_loss(result)
        step, is_sum, is_pair = microbatch.normaliser, isinstance(result, Sum), isinstance(result, tuple)
        all_samples = (1 if step is None else step.all_samples()) if is_sum else None
        root, factor, counted = root_and_count(result, targets.num_samples, all_samples)
        count: Number = counted
        if isinstance(counted, Tensor):
            is_known = not self._deferred and not counted.requires_grad
            count = counted.item() if is_known else counted.double()  # integers times floats are float32
        # The samples that a mean counts are shared by the ranks along `context`, whose sums are added up.
        weight = microbatch.weight * (1 if is_pair else targets.share)
        normaliser: Number = 0.0 if is_sum else 1.0
        if step is not None:  # in training
            normaliser = step.of_loss(count, targets.values, is_pair=is_pair) / microbatch.loss_scale
        factors = _without_ones(factor, microbatch.weight if is_sum else weight)
        loss = MicrobatchLoss(root, factors, count if weight == 1 else count * weight, normaliser)
        if self._observers.hears("after_loss"):
            counts = microbatch.weight > 0
            seen_loss = LossPass(*seen, loss.total(root.detach()), targets.num_samples, counts=counts)
            self._observers.tell("after_loss", seen_loss)
        return loss


def _detached(number: Number) -> Number:
    return number.detach() if isinstance(number, Tensor) else number


def _on_host(number: Number) -> float:
    return number.item() if isinstance(number, Tensor) else number


def _without_ones(*factors: Number) -> tuple[Number, ...]:
    return tuple(factor for factor in factors if isinstance(factor, Tensor) or factor != 1)


@final
class StartGradients:
    """The gradients that backward passes start from: those of total / normaliser by the root of a loss.

    Most losses of a training have the same, which is kept: to make one takes operations on the device.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._gradient = torch.zeros(())

    def of(self, loss: MicrobatchLoss) -> Tensor:
        root, normaliser = loss.root, loss.normaliser
        if isinstance(normaliser, Tensor) or any(isinstance(factor, Tensor) for factor in loss.factors):
            return _start_gradient(loss)
        key = (root.dtype, root.device, normaliser, loss.factors)
        # A hook may have written into it: then it has another version.
        if key != self._key or self._gradient._version:
            self._key, self._gradient = key, _start_gradient(loss)
        return self._gradient


def _start_gradient(loss: MicrobatchLoss) -> Tensor:
    """Go back from total / normaliser to the root, as autograd would."""
    with torch.no_grad():
        total = loss.total(loss.root)
        gradient = torch.ones_like(total) / loss.divisor(total.dtype)
        for factor in reversed(loss.factors):
            gradient = gradient * factor
        return gradient.to(loss.root.dtype)


@final
class LossSums:
    """The sums over microbatches: loss total, count, and count times what the losses were divided by. They
    are Python's numbers, which are float64; or, `deferred`, on the device, which is not waited for."""

    def __init__(self, device: torch.device, *, deferred: bool) -> None:
        self._device, self._deferred = device, deferred
        self._numbers = [0.0, 0.0, 0.0]  # that the row does not have yet
        self._row: Tensor | None = None
        self._on_host: Counted | None = Counted(0.0, 0.0)

    def add(self, *numbers: Number) -> None:
        if self._on_host is not None:
            self._on_host = self._on_host.plus(*numbers[1:])
        for place, number in enumerate(numbers):
            if self._deferred and isinstance(number, Tensor):
                self._on_device()[place].add_(number)
            else:
                self._numbers[place] += float(number)
        if not self._deferred:
            self._row = None

    @property
    def counted(self) -> Counted | None:
        """Return what the host knows of them."""
        return self._on_host

    def row(self) -> Tensor:
        """Return the three as one tensor."""
        if not self._deferred:
            if self._row is None:  # torch.tensor would take five times as long
                self._row = torch.from_numpy(numpy.array(self._numbers)).to(self._device)
            return self._row
        row = self._on_device()
        for place, number in enumerate(self._numbers):
            if number:
                row[place].add_(number)
        self._numbers = [0.0, 0.0, 0.0]
        return row

    def _on_device(self) -> Tensor:
        if self._row is None:
            self._row = torch.zeros(TALLY.shape, dtype=TALLY.dtype, device=self._device)
        return self._row
