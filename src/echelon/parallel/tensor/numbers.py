"""Integers that modules compute with, like their number of heads: where a pattern finds them, and how a rank
gets its part of one."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, NamedTuple, final

from torch import nn

from echelon.nn.wrapping import Wrapping


class Number(NamedTuple):
    """`attribute` of a module or of the model's config; 'config.heads' of a module, where that reads it."""

    name: str
    owner: Any
    attribute: str

    @property
    def value(self) -> Any:
        return attrgetter(self.attribute)(self.owner)

    def divide(self, ranks: int, wrapping: Wrapping) -> None:
        """Let the owner compute with one rank's part."""
        if self.value is None:
            return
        part, (*path, attribute) = self.value // ranks, self.attribute.split(".")
        if not path:
            wrapping.assign(self.owner, attribute, part)
            return
        local = ModuleConfig(self.owner.config)
        setattr(local, attribute, part)
        wrapping.assign(self.owner, "config", local)


@final
class ModuleConfig:
    """The config as one module reads it: some numbers are this rank's, all others those of the model."""

    def __init__(self, config: Any) -> None:
        self._shared_config = config

    def __getattr__(self, name: str) -> Any:
        if name == "_shared_config":  # not there yet, while a copy is made
            raise AttributeError(name)
        return getattr(self._shared_config, name)


def find_numbers(model: nn.Module, pattern: str) -> Iterator[Number]:
    """The numbers that a pattern matches: of modules, of the configs that they read, or of the model's."""
    path, _, attribute = pattern.rpartition(".")
    if path == "config":
        config = getattr(model, "config", None)
        if hasattr(config, attribute):
            yield Number(pattern, config, attribute)
        return
    for name, module in model.named_modules():
        if fnmatchcase(name, path) and hasattr(module, attribute):
            yield Number(f"{name}.{attribute}", module, attribute)
        elif _reads_from_config(name, module, path, attribute):
            yield Number(f"{name}.config.{attribute}", module, f"config.{attribute}")


def _reads_from_config(name: str, module: nn.Module, path: str, attribute: str) -> bool:
    matches = bool(name) and path.endswith(".config") and fnmatchcase(name, path.removesuffix(".config"))
    return matches and hasattr(getattr(module, "config", None), attribute)
