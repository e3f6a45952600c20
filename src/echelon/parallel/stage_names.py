"""The names of a model's parameters and modules, kept from before it was split into stages."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn


class Names(NamedTuple):
    """A model's names, from before it was split: of parameters (the first, where tied) and of modules."""

    parameters: Mapping[nn.Parameter, str]
    modules: Mapping[nn.Module, str]

    @classmethod
    def of(cls, model: nn.Module) -> "Names":
        return cls(
            {parameter: name for name, parameter in model.named_parameters()},
            {module: name for name, module in model.named_modules()},
        )

    def buffer(self, module: nn.Module, name: str) -> str:
        """Return the model's name for a buffer of a module, or the module's for one of another module."""
        path = self.modules.get(module)
        return f"{path}.{name}" if path else name
