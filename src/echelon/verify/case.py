"""One training, as data that ranks can rebuild: the model, the batches, the loss, the optimizer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from echelon.dropout import unkeyed_dropout
from echelon.errors import UserError
from echelon.verify.wide import widen


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
        random = unkeyed_dropout(model)
        if random:
            raise UserError(
                f"dropout inside {', '.join(random)}: only the masks of torch's own dropout layers are the "
                "same in every layout, and can be compared; set it to 0, or use nn.Dropout there"
            )
        widen(model)
        return model.train()

    def batches(self) -> list[tuple[Any, Any]]:
        return [_to_double(self.make_batch(step)) for step in range(self.steps)]


def _to_double(batch: tuple[Any, Any]) -> tuple[Any, Any]:
    def convert(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    converted: tuple[Any, Any] = tree_map(convert, batch)
    return converted
