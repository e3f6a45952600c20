"""Integers that a forward keeps in attributes of its modules (self.calls += 1).

On one device a step is one forward pass. Where it has several, as microbatches and second runs of layers,
each begins with the numbers of the first (stage.py, memory/recompute/second_run.py).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

K = TypeVar("K")
NumberSlot = tuple[nn.Module, str]
ABSENT: Any = object()  # for the value of an attribute that is not there


def integer_attributes(modules: Iterable[nn.Module]) -> dict[NumberSlot, int]:
    """Return the attributes of the user's modules that are integers."""
    return {
        (module, name): value
        for module in modules
        if not type(module).__module__.startswith(("torch.", "echelon."))
        for name, value in vars(module).items()
        if type(value) is int
    }


def named_integers(model: nn.Module) -> dict[str, int]:
    """Return the same by name: "layers.0.calls"."""
    paths = {module: path for path, module in model.named_modules()}
    numbers = integer_attributes(paths)
    return {f"{paths[module]}.{key}".removeprefix("."): number for (module, key), number in numbers.items()}


def moved_integers(before: Mapping[K, int], now: Mapping[K, int]) -> dict[K, int]:
    """Return by how much each has gone up; one that was not there before, from 0."""
    moved = {key: number - before.get(key, 0) for key, number in now.items()}
    return {key: by for key, by in moved.items() if by}


def attributes(slots: Iterable[NumberSlot]) -> dict[NumberSlot, Any]:
    """Return what these attributes are now, for `attributes_as`."""
    return {(module, name): vars(module).get(name, ABSENT) for module, name in slots}


@contextmanager
def attributes_as(values: Mapping[NumberSlot, Any]) -> Iterator[None]:
    """Inside, attributes are these; then what they were."""
    current = attributes(values)
    _set(values)
    try:
        yield
    finally:
        _set(current)


def _set(values: Mapping[NumberSlot, Any]) -> None:
    for (module, name), value in values.items():
        if value is ABSENT:
            vars(module).pop(name, None)
        else:
            vars(module)[name] = value
