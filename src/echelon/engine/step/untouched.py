"""Forward passes that leave no trace: afterwards the model, and all generators of random numbers, are as if
nobody had called it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from echelon.engine.step.attribute_snapshot import AttributeSnapshot
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
