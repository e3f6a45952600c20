"""Buffers that are not persistent, and have changed in training: no state dict has them, a checkpoint does.

torch leaves them out of state dicts because they can be computed again: tables of positions, masks. One that
a forward writes to cannot. They are told apart by whether anything has written to them since the engine was
made.
"""

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn

from echelon.state.ownership import OwnedSlice, whole_slice

TEMPORARY = "temporary"  # their part in a checkpoint


@final
class TemporaryBuffers:
    """Those of a model, as far as they are on this rank."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {name: _mark(buffer) for name, buffer in _temporary(module)}

    def owned(self) -> list[OwnedSlice]:
        """Those that have changed, or that were not there."""
        return [
            OwnedSlice(whole_slice(name, buffer, TEMPORARY), buffer)
            for name, buffer in _temporary(self._module)
            if self._before.get(name) != _mark(buffer)
        ]

    def all(self) -> list[OwnedSlice]:
        return [
            OwnedSlice(whole_slice(name, buffer, TEMPORARY), buffer)
            for name, buffer in _temporary(self._module)
        ]


def _temporary(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, each in module.named_modules():
        for name in sorted(each._non_persistent_buffers_set):
            buffer = each._buffers.get(name)
            if buffer is not None and buffer.layout is torch.strided:
                yield f"{path}.{name}".removeprefix("."), buffer


def _mark(buffer: Tensor) -> tuple[int, int]:
    return buffer._version, buffer.data_ptr()
