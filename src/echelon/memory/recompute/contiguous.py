"""contiguous=true (ZeRO-R's MD): checkpoints of a stage lie in one preallocated memory.

Checkpoints live from a forward pass to its backward pass, and everything between them is gone sooner. In the
allocator's memory they would leave gaps that fit nothing else. The first step takes memory as usual and finds
out how much is needed at a time; from then on a checkpoint is copied into a slot of one memory, and its slot
is free again when the last tensor that lies in it is gone: also one that autograd has saved.

More is needed when larger batches come: those take memory as usual, and the next step has a larger one.
"""

import weakref
from bisect import bisect_left, insort
from collections import deque
from typing import Any, final

import torch
from torch import Tensor

from echelon.collectives.buffer_layout import ALIGNMENT, round_up
from echelon.memory.recompute.checkpoints import ArgumentName, Checkpoints, Kept
from echelon.memory.recompute.dense import is_dense
from echelon.nn.autograd.saved_tensors import Hooks, KeptTensor
from echelon.parallel.observer import StepObserver

# Slots in one piece of memory: each in the first gap that is large enough.


@final
class Slots:
    """Which bytes of a memory are taken. It may be larger than any memory: `size` is what was needed.

    >>> slots = Slots()
    >>> slots.take(100), slots.take(256), slots.take(10)
    (0, 256, 512)
    >>> slots.free(256); slots.take(300), slots.take(200), slots.size
    (768, 256, 1280)
    """

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []  # begin, end
        self._freed: deque[int] = deque()  # by any thread
        self.size = 0

    def take(self, num_bytes: int) -> int:
        """Where a slot begins."""
        self._collect()
        begin, size = 0, round_up(max(num_bytes, 1), ALIGNMENT)
        for other_begin, other_end in self._taken:
            if begin + size <= other_begin:
                break
            begin = other_end
        insort(self._taken, (begin, begin + size))
        self.size = max(self.size, begin + size)
        return begin

    def free(self, begin: int) -> None:
        self._freed.append(begin)

    def _collect(self) -> None:
        while self._freed:
            del self._taken[bisect_left(self._taken, (self._freed.popleft(), 0))]


@final
class ContiguousCheckpoints(StepObserver):
    """Keeps copies in one memory; what has no gradient (a mask that all layers take) is kept by `inner`."""

    def __init__(self, device: torch.device, inner: Checkpoints) -> None:
        self._inner = inner
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._slots = Slots()

    def keep(self, tensor: Tensor, hooks: Hooks | None, argument: ArgumentName) -> Kept:
        if self.keeps_memory(tensor, argument):
            return self._inner.keep(tensor, hooks, argument)
        slot = self._take(tensor.nbytes).view(tensor.dtype)
        copy = slot.as_strided(tensor.shape, tensor.stride())
        copy.copy_(tensor.detach())
        return KeptTensor(copy, hooks)

    def keeps_memory(self, tensor: Tensor, argument: ArgumentName) -> bool:  # noqa: ARG002
        is_hidden_state = tensor.layout == torch.strided and tensor.requires_grad and tensor.numel() > 0
        return not is_hidden_state or not is_dense(tensor)

    def kept_bytes(self, tensor: Tensor, argument: ArgumentName) -> int:
        if self.keeps_memory(tensor, argument):
            return self._inner.kept_bytes(tensor, argument)
        return tensor.nbytes

    def after_passes(self) -> None:
        """Make the memory as large as steps need. Slots of an earlier one stay where they are."""
        if self._slots.size > len(self.memory):
            self.memory = self.memory.new_empty(self._slots.size)
            self._slots = Slots()

    def _take(self, num_bytes: int) -> Tensor:
        """Bytes with a storage of their own: its end frees the slot."""
        begin = self._slots.take(num_bytes)
        memory = self.memory[begin : begin + num_bytes]
        if len(memory) < num_bytes:
            memory = self.memory.new_empty(num_bytes)
        return _alias(memory, self._slots, begin)


class _CudaMemory:
    """What torch needs to know to make a tensor of memory that somebody else holds."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (len(memory),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def _alias(memory: Tensor, slots: Slots, begin: int) -> Tensor:
    """The same bytes as a tensor with a storage of its own, which calls `slots.free(begin)` at its end."""
    owner: Any = _CudaMemory(memory) if memory.is_cuda else memory.numpy()
    weakref.finalize(owner, slots.free, begin)
    return torch.as_tensor(owner, device=memory.device)
