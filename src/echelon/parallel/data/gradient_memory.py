"""Memory for gradients of units that are on their way (zero 2 and 3): new for each, or preallocated.

Preallocated (contiguous=true, ZeRO's MD): every buffer is as large as the largest that is ever asked for, so
any buffer serves any unit, and steps take no new memory between the activations of a backward pass. One
gradient is produced while another is summed; where more are open at a time, more buffers are made, and stay.

    take(100)   buffer 0 [:100]
    take(80)    buffer 1 [:80]          free: none
    give_back(buffer 0)                 free: buffer 0, when the sum that read it has been waited for
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, final

import torch
from torch import Tensor

_AT_ONCE = 2  # one is produced, one is summed


class GradientKind(NamedTuple):
    """Gradients that can lie in the same memory."""

    dtype: torch.dtype
    device: torch.device


class GradientMemory(ABC):
    """Where gradients lie until they are summed."""

    @abstractmethod
    def take(self, size: int, kind: GradientKind) -> Tensor:
        """Memory for `size` elements, with any values."""

    @abstractmethod
    def give_back(self, memory: Tensor) -> None:
        """Nothing that was issued before needs the values any more, or has not been waited for."""

    def storages(self) -> list[Tensor]:
        """What is held while no gradient is on its way."""
        return []


@final
class NewMemory(GradientMemory):
    """New for each gradient."""

    def take(self, size: int, kind: GradientKind) -> Tensor:
        return torch.empty(size, dtype=kind.dtype, device=kind.device)

    def give_back(self, memory: Tensor) -> None:
        pass


@final
class PreallocatedMemory(GradientMemory):
    """Buffers of the largest size."""

    def __init__(self, sizes: Iterable[tuple[int, GradientKind]], at_once: int = _AT_ONCE) -> None:
        """`sizes`: of every gradient that will ask; `at_once`: how many buffers are made now."""
        self._largest: Counter[GradientKind] = Counter()
        for size, kind in sizes:
            self._largest[kind] = max(self._largest[kind], size)
        self._buffers = {kind: [self._make(kind) for _ in range(at_once)] for kind in self._largest}
        self._free = {kind: list(buffers) for kind, buffers in self._buffers.items()}

    def _make(self, kind: GradientKind) -> Tensor:
        return torch.empty(self._largest[kind], dtype=kind.dtype, device=kind.device)

    def take(self, size: int, kind: GradientKind) -> Tensor:
        assert size <= self._largest[kind]
        if not self._free[kind]:
            self._free[kind].append(self._make(kind))
            self._buffers[kind] += self._free[kind]
        return self._free[kind].pop()[:size]

    def give_back(self, memory: Tensor) -> None:
        kind = GradientKind(memory.dtype, memory.device)
        buffer = next(each for each in self._buffers[kind] if each.data_ptr() == memory.data_ptr())
        assert all(each is not buffer for each in self._free[kind]), "given back twice"
        self._free[kind].append(buffer)

    def storages(self) -> list[Tensor]:
        return [buffer for buffers in self._buffers.values() for buffer in buffers]
