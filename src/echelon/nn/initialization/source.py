"""Where the weights of a model come from when it starts without memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from echelon.errors import raise_errors
from echelon.nn.huggingface import open_weights
from echelon.nn.initialization.initial_values import InitialValues
from echelon.state.ownership import Slice


@final
class WeightSource:
    """Parts of a model's tensors by their names, from a folder or as the model begins. Nothing is read or
    computed before somebody asks. It knows the model as it is now, so make it first."""

    def __init__(self, model: nn.Module, folder: str | Path | None, device: torch.device) -> None:
        """Raises if some values are not known. `device` is where they are computed."""
        self._initial = InitialValues(model, device)
        self._files = None if folder is None else open_weights(folder, model)
        if self._files is not None:
            self._files.check()
        self._in_files = set() if self._files is None else {*self._files.names(), *self._files.ties}
        raise_errors("the initial values of the model", self._initial.errors(but=self._in_files))

    @property
    def seed(self) -> int:
        """Of random initial values."""
        return self._initial.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._initial.seed = seed

    def describe(self) -> list[str]:
        """Where values come from, in lines that must be the same on every rank."""
        return [*self._initial.describe(), *([] if self._files is None else self._files.describe())]

    def constants(self) -> list[Tensor]:
        """Values that are on this rank already; rank 0's count."""
        return self._initial.constants()

    def first_name(self, name: str) -> str:
        """The first name of a tensor that has several."""
        return self._initial.first_name(name)

    def read(self, name: str, boxes: Sequence[Slice]) -> list[Tensor]:
        """Boxes of one tensor, in memory of their own or of one whole tensor."""
        if self._files is not None and name in self._in_files:
            return self._files.read(name, boxes)
        return self._initial.read(name, boxes)
