"""One training, as data that ranks can rebuild: the model, the batches, the loss, the optimizer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from echelon.errors import UserError


@dataclass(frozen=True)
class Case:
    """One training to be held against one device. Functions must be importable, as for `launch`."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], tuple[Any, Any]]  # the global batch of a step
    loss: Callable[[Any, Any], Any]
    make_optimizer: Callable[[Any], torch.optim.Optimizer]
    steps: int = 20
    clip: float | None = 1.0
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # more arguments for `parallelize`

    def build(self, rank: int = 0) -> nn.Module:
        """The model in float64, training, from the case's seed; other ranks start from other weights, so
        that a plan which forgets to make them equal is found out."""
        torch.manual_seed(self.seed + rank)
        model = self.make_model().double()
        random = [name or "the model" for name, its in model.named_modules() if _dropout(its) > 0]
        if random:
            raise UserError(
                f"dropout in {', '.join(random)}: its masks differ from layout to layout, so that two "
                "trainings cannot be compared; verify the model with dropout 0"
            )
        return model.train()

    def batches(self) -> list[tuple[Any, Any]]:
        return [_to_double(self.make_batch(step)) for step in range(self.steps)]


def _to_double(batch: tuple[Any, Any]) -> tuple[Any, Any]:
    def convert(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    converted: tuple[Any, Any] = tree_map(convert, batch)
    return converted


def _dropout(module: nn.Module) -> float:
    """With what probability a module of torch's own drops; recurrent ones and attention have it inside."""
    if isinstance(module, _DropoutNd):
        return module.p
    inside = isinstance(module, nn.RNNBase | nn.MultiheadAttention)
    return float(module.dropout) if inside else 0.0  # type: ignore[arg-type]
