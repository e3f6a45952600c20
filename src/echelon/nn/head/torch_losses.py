"""Losses that take logits that wait; torch's own cross entropy among them.

torch's is known by itself: `F.cross_entropy`, a `functools.partial` of it, an `nn.CrossEntropyLoss`. What a
function that calls it does with logits besides, nobody knows: such a loss gets logits.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.nn.head.deferred import fused_cross_entropy, is_deferred
from echelon.nn.losses import Loss


class WaitingLoss(ABC):
    """A loss that takes logits that wait, and all others."""

    @property
    @abstractmethod
    def takes_deferred(self) -> bool:
        """Whether it does so now."""

    @abstractmethod
    def __call__(self, output: Any, targets: Any) -> Any: ...


# As they are in torch: what is put in their place does something else.
_FUNCTION, _FORWARD = F.cross_entropy, nn.CrossEntropyLoss.forward
_NAMES = ("weight", "ignore_index", "reduction", "label_smoothing")


class CrossEntropySettings(NamedTuple):
    ignored: int
    smoothing: float
    is_mean: bool


@final
class TorchCrossEntropy(WaitingLoss):
    """torch's cross entropy of logits [samples, classes], which is computed with the head's matrix; of all
    else it is what `otherwise` returns."""

    def __init__(self, loss: Loss, otherwise: Loss) -> None:
        self._loss, self._otherwise = loss, otherwise

    @property
    def takes_deferred(self) -> bool:
        return known_settings(self._loss) is not None

    def __call__(self, output: Any, targets: Any) -> Any:
        settings = known_settings(self._loss)  # a module's can change
        if settings is None or not is_deferred(output) or not _are_classes(targets, output):
            return self._otherwise(output, targets)
        ignored, smoothing, is_mean = settings
        total = fused_cross_entropy(output, targets, ignored=ignored, smoothing=smoothing)
        if total is None:
            return self._otherwise(output, targets)
        return _mean(total, (targets != ignored).sum()) if is_mean else total


def _are_classes(targets: Any, logits: Tensor) -> bool:
    """Return whether targets are the classes of samples, and neither probabilities nor of other dims."""
    is_right = type(targets) is Tensor and targets.dtype == torch.int64
    return is_right and logits.dim() == 2 and targets.shape == logits.shape[:1]


def _mean(total: Tensor, count: Tensor) -> Tensor:
    """Of no samples it is not a number, and has no gradient, as torch's."""
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def known_settings(loss: Any) -> CrossEntropySettings | None:
    """Return the settings of torch's cross entropy, if a loss is that now, without weights of classes."""
    if F.cross_entropy is not _FUNCTION:
        return None
    given: Mapping[str, Any] = {}
    if type(loss) is functools.partial and not loss.args:
        given, loss = loss.keywords, loss.func
    elif type(loss) is nn.CrossEntropyLoss and _is_as_made(loss):
        given, loss = {name: getattr(loss, name) for name in _NAMES}, _FUNCTION
    if loss is not _FUNCTION or not set(given) <= set(_NAMES) or given.get("weight") is not None:
        return None
    ignored, smoothing = given.get("ignore_index", -100), given.get("label_smoothing", 0.0)
    reduction = given.get("reduction", "mean")
    if type(ignored) is not int or reduction not in ("mean", "sum"):
        return None
    if type(smoothing) not in (int, float) or not 0 <= smoothing <= 1:
        return None
    return CrossEntropySettings(ignored, float(smoothing), reduction == "mean")


def _is_as_made(module: nn.CrossEntropyLoss) -> bool:
    """Return whether a call of the module computes the function, and nothing else."""
    hooks: list[Any] = [value for name, value in vars(module).items() if name.endswith("_hooks")]
    replaced = "forward" in vars(module) or type(module).forward is not _FORWARD
    return not replaced and not any(hooks) and not nn.modules.module._has_any_global_hook()


def known_loss(loss: Loss, otherwise: Callable[[Any, Any], Any]) -> Loss:
    """Return `otherwise`, which computes this loss of logits; if it is torch's, of those that wait too."""
    return otherwise if known_settings(loss) is None else TorchCrossEntropy(loss, otherwise)
