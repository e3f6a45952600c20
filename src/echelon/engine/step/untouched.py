"""Forward passes that leave no trace: afterwards the model, and all generators of random numbers, are as if
nobody had called it.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from echelon.nn.autograd.generators import GeneratorStates
from echelon.nn.buffer_snapshot import BufferSnapshot

_LARGEST_BUFFER = 2**28  # bytes; larger ones are tables that no forward changes


@contextmanager
def untouched(
    stages: Sequence[nn.Module], modules: Iterable[nn.Module], device: torch.device
) -> Iterator[None]:
    """Around forward passes of `stages`. Modes, attributes and own generators are those of `modules`."""
    modules = list(modules)
    attributes, generators = AttributeSnapshot(modules), GeneratorStates(device, modules)
    buffers = BufferSnapshot(stages, largest=_LARGEST_BUFFER)
    buffers.take()
    try:
        yield
    finally:
        buffers.restore(refused=True)
        generators.restore()
        attributes.restore()


# The plain attributes of modules, so that forward passes of an audit leave them as they were.

_BYTES = 64 * 2**20  # of all tensors and arrays that are copied
_ITEMS = 100_000  # of all containers that are copied
_STRUCTURE = {"_parameters", "_buffers", "_modules"}  # what modules hold beside plain attributes
_SEQUENCES = (list, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)


@final
class AttributeSnapshot:
    """Copies at once; `restore` puts everything back."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._attributes = {module: _plain_attributes(module) for module in modules}
        self._copies: dict[int, tuple[Any, Any]] = {}  # a value, and what it held
        self._bytes_left, self._items_left = _BYTES, _ITEMS
        for attributes in self._attributes.values():
            for value in attributes.values():
                self._copy(value)

    @torch.no_grad()
    def restore(self) -> None:
        for value, copy in self._copies.values():
            _put_back(value, copy)
        for module, before in self._attributes.items():
            _restore_attributes(module, before)

    def _copy(self, value: Any) -> None:
        if id(value) in self._copies:
            return
        if _is_copied(value):
            if value.nbytes <= self._bytes_left:
                self._bytes_left -= value.nbytes
                is_tensor = isinstance(value, Tensor)
                self._copies[id(value)] = value, value.detach().clone() if is_tensor else value.copy()
        elif type(value) in (*_SEQUENCES, *_MAPPINGS, set, tuple):
            self._copy_container(value)

    def _copy_container(self, value: Any) -> None:
        if len(value) > self._items_left:
            return
        self._items_left -= len(value)
        is_mapping = type(value) in _MAPPINGS
        if type(value) is not tuple:
            self._copies[id(value)] = value, dict(value) if is_mapping else list(value)
        for member in list(value.values()) if is_mapping else list(value):
            self._copy(member)


def _is_copied(value: Any) -> bool:
    """Whether its values can be copied, and written again."""
    if type(value) is numpy.ndarray:
        return bool(value.flags.writeable) and not value.dtype.hasobject
    if type(value) is not Tensor or value.layout != torch.strided or value.is_meta or value.is_inference():
        return False
    is_expanded = any(step == 0 and size > 1 for step, size in zip(value.stride(), value.shape, strict=True))
    return not is_expanded


def _put_back(value: Any, copy: Any) -> None:
    if isinstance(value, Tensor):
        if value.shape != copy.shape or value.dtype != copy.dtype:
            value.data = copy
            return
        with _unsafe_preserve_version_counter(value):
            value.copy_(copy)
    elif isinstance(value, numpy.ndarray):
        value[...] = copy
    elif type(value) in _SEQUENCES:
        value.clear()
        value.extend(copy)
    else:
        value.clear()
        value.update(copy)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _STRUCTURE}


def _restore_attributes(module: nn.Module, before: dict[str, Any]) -> None:
    current = vars(module)
    for name in [name for name in current if name not in before and name not in _STRUCTURE]:
        del current[name]
    for name, value in before.items():
        if current.get(name, _STRUCTURE) is not value:
            current[name] = value
