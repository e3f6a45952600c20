"""A microbatch in flight through a stage: what its backward pass needs, and nothing else; and its loss.

Of the outputs only the way back is kept: their values are freed when they are sent, or used.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from echelon.engine.step.runtime.message import Gradients, Leaf, Spec
from echelon.engine.step.runtime.split_backward import SplitBackward
from echelon.nn.losses import Sum, check_loss, total_and_count
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.observer import ForwardPass, LossPass, Observers
from echelon.parallel.padding import LocalTargets
from echelon.update.numbers import Number


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


def wanted(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return the leaves that want a gradient."""
    return [leaf for leaf in leaves if leaf.wants_gradient]


# A microbatch, as the stages of a rank may need it.


class MicrobatchLoss(NamedTuple):
    """The loss total of a microbatch, how much it is the total of, and what to divide it by before the
    backward pass: the count of its update, as far as it is known, by the loss scale. In an evaluation 1, or
    0 for a sum, which is not divided."""

    total: Tensor
    counted: Number
    normaliser: Number


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

    def __init__(self, layers: LayerSharding, observers: Observers) -> None:
        self._layers, self._observers = layers, observers
        # Whether losses are this rank's to count: those along `tensor` compute the same.
        self.are_counted = layers.counts_loss

    def deferring(self) -> AbstractContextManager[None]:
        """Around the forward of the last stage: logits may wait for the loss."""
        return self._layers.deferring()

    def of(self, output: Any, microbatch: Microbatch, forward: ForwardPass) -> MicrobatchLoss:
        targets: LocalTargets = microbatch.targets
        with self._observers.around("around_loss", forward):
            seen = self._layers.without_padding(output, targets)
            result = self._layers.loss(*seen)
        check_loss(result)
        step, is_sum = microbatch.normaliser, isinstance(result, Sum)
        all_samples = (1 if step is None else step.all_samples()) if is_sum else None
        total, count = total_and_count(result, targets.num_samples, all_samples)
        self._observers.tell(
            "after_loss", LossPass(*seen, total, targets.num_samples, counts=microbatch.weight > 0)
        )
        # The samples that a mean counts are shared by the ranks along `context`, whose sums are added up.
        is_pair = isinstance(result, tuple)
        weight = microbatch.weight * (1 if is_pair else targets.share)
        normaliser: Number = 0.0 if is_sum else 1.0
        if step is not None:  # in training
            normaliser = step.of_loss(count, targets.values, is_pair=is_pair) / microbatch.loss_scale
        own = microbatch.weight if is_sum else weight
        if own == weight == 1:  # as in most plans; a product would be one more operation of both passes
            return MicrobatchLoss(total, count, normaliser)
        return MicrobatchLoss(total * own, count * weight, normaliser)
