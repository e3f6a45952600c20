"""What a training needs to know of its task: a model, batches, a loss, and what to tell of them.

`tasks.py` opens the task of a job. The loop, the logbook and the display ask a task and never which it is.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from echelon.engine.step.metrics import Measure
from echelon.models import ImageConfig, ModelConfig


class TaskBatches(Protocol):
    """Global batches by number, the same in every layout."""

    def at(self, step: int, part: tuple[int, int] = (0, 1)) -> tuple[Tensor, Tensor]:
        """(inputs, targets); `part=(i, n)`: the rows of replica i of n."""


class Task(Protocol):
    """The task of a job, as every rank opens it."""

    @property
    def unit(self) -> str:
        """What the loss counts: "tokens", or "images"."""

    @property
    def config(self) -> ModelConfig | ImageConfig: ...

    @property
    def num_parameters(self) -> int: ...

    @property
    def data_name(self) -> str: ...

    @property
    def data_size(self) -> int:
        """How many units there are to train on."""

    @property
    def training(self) -> TaskBatches: ...

    @property
    def validation(self) -> TaskBatches | None: ...

    @property
    def num_validation_batches(self) -> int: ...

    @property
    def loss(self) -> Callable[[Any, Any], tuple[Tensor, Tensor]]: ...

    @property
    def measure(self) -> Measure | None:
        """What a validation measures beside the loss: the share of right answers, as (total, count)."""

    def build(self) -> nn.Module:
        """The model with its initial values."""

    def load(self, folder: str | Path) -> nn.Module:
        """The model with the weights in a folder."""

    def sample(self, folder: Path) -> str:
        """What the trained model in a folder does, to look at."""
