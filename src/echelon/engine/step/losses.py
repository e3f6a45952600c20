"""The loss of a microbatch, on the ranks of the last stage."""

from typing import Any, final

from echelon.engine.arguments import check_loss
from echelon.engine.step.runtime.flight import Microbatch, MicrobatchLoss
from echelon.nn.losses import total_and_count
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.observer import ForwardPass, LossPass, Observers
from echelon.parallel.padding import LocalTargets
from echelon.update.numbers import Number


@final
class Losses:
    """Calls the user's loss without padding, and says what it is divided by before the backward pass."""

    def __init__(self, layers: LayerSharding, observers: Observers) -> None:
        self._layers, self._observers = layers, observers
        # Whether losses are this rank's to count: those along `tensor` compute the same.
        self.are_counted = layers.counts_loss

    def of(self, output: Any, microbatch: Microbatch, forward: ForwardPass) -> MicrobatchLoss:
        targets: LocalTargets = microbatch.targets
        with self._observers.around("around_loss", forward):
            seen = self._layers.without_padding(output, targets)
            result = self._layers.loss(*seen)
        check_loss(result)
        total, count = total_and_count(result, targets.num_samples)
        self._observers.tell(
            "after_loss", LossPass(*seen, total, targets.num_samples, counts=microbatch.weight > 0)
        )
        # The samples that a mean counts are shared by the ranks along `context`.
        is_pair = isinstance(result, tuple)
        weight = microbatch.weight * (1 if is_pair else targets.share)
        normaliser: Number = 1.0
        if microbatch.normaliser is not None:  # in training
            normaliser = microbatch.normaliser.of_loss(count, targets.values, is_pair=is_pair)
            normaliser = normaliser / microbatch.loss_scale
        if weight == 1:  # as in most plans; a product would be one more operation of both passes
            return MicrobatchLoss(total, count, normaliser)
        return MicrobatchLoss(total * weight, count * weight, normaliser)
