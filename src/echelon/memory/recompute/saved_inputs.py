"""The inputs of layers that are recomputed, and how they are kept until the second run.

whole        as they are
contiguous   copied into one preallocated memory (contiguous=true, ZeRO-R's MD)
split        each tensor rank keeps its part of what all hold alike (checkpoints=split, ZeRO-R's Pa)
"""

import weakref
import zlib
from bisect import bisect_left, insort
from collections import deque
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.collectives.agreement import device_fingerprint, gather_rows
from echelon.collectives.buffer_layout import ALIGNMENT, round_up
from echelon.memory.storages import is_dense
from echelon.nn.autograd.saved_tensors import Hooks, KeptTensor
from echelon.parallel.observer import StepObserver


class ArgumentName(NamedTuple):
    layer: str
    number: int


class SavedInputs:
    """Keeps tensors: as they are, or in other memory. `hooks`: those around the layer, which count them."""

    def keep(self, tensor: Tensor, hooks: Hooks | None, argument: ArgumentName) -> "Kept":  # noqa: ARG002
        return KeptTensor(tensor, hooks)

    def keeps_memory(self, tensor: Tensor, argument: ArgumentName) -> bool:  # noqa: ARG002
        """Return whether `keep` will hold the very memory of the tensor: then autograd may save it too."""
        return True

    def kept_bytes(self, tensor: Tensor, argument: ArgumentName) -> int:  # noqa: ARG002
        """Return the bytes that `keep` will hold."""
        return tensor.untyped_storage().nbytes()


@final
class Slots:
    """The bytes of a memory that are taken. It may be larger than any memory: `size` is what was needed.

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
class ContiguousInputs(SavedInputs, StepObserver):
    """Keeps copies in one memory; what has no gradient (a mask that all layers take) is kept by `inner`.

    Inputs live from a forward pass to its backward pass, and all else that is allocated between is gone
    sooner: in the allocator's memory they would leave gaps that fit nothing else. The first step allocates as
    usual and finds out how much is needed at a time; from then on an input is copied into a slot of one
    memory. Larger batches allocate as usual again, and the next step has a larger memory.
    """

    def __init__(self, device: torch.device, inner: SavedInputs) -> None:
        self._inner = inner
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._slots = Slots()

    def keep(self, tensor: Tensor, hooks: Hooks | None, argument: ArgumentName) -> "Kept":
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
        """Make the memory as large as steps need."""
        # Tensors in slots of the old memory keep it alive, with the Slots that they will free.
        if self._slots.size > len(self.memory):
            self.memory = self.memory.new_empty(self._slots.size)
            self._slots = Slots()

    def _take(self, num_bytes: int) -> Tensor:
        """Return bytes with a storage of their own: its end frees the slot."""
        begin = self._slots.take(num_bytes)
        memory = self.memory[begin : begin + num_bytes]
        if len(memory) < num_bytes:
            memory = self.memory.new_empty(num_bytes)
        # A view would share the storage of the whole memory: nothing would tell when the last tensor of a
        # slot, which autograd may have saved, is gone. The array that torch keeps for a storage does.
        owner: Any = _CudaMemory(memory) if memory.is_cuda else memory.numpy()
        weakref.finalize(owner, self._slots.free, begin)
        return torch.as_tensor(owner, device=memory.device)


class _CudaMemory:
    """Lets torch make a tensor of memory that another object holds."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (len(memory),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


@final
class SplitInputs(SavedInputs):
    """Keeps parts over a group of ranks; what cannot be split, and the parts, are kept by `inner`.

        forward     rank 0 keeps | x₀ x₁ |   rank 1 keeps | x₂ 0 |      parts of equal size, padded
        backward    all-gather over `tensor`, before the layers run again

    Only what is the same on all ranks may be split: the hidden state between whole layers is. Ranks compare
    every argument when a layer is first called; one that differs (the hidden state between a column and a row
    of a matrix) stays whole on each. So does what has no gradient: masks and tokens, one for all layers.
    """

    def __init__(self, group: Group, inner: SavedInputs) -> None:
        self._group, self._inner = group, inner
        self._is_same: dict[ArgumentName, bool] = {}

    def keep(self, tensor: Tensor, hooks: Hooks | None, argument: ArgumentName) -> "Kept":
        if not self._is_split(tensor, argument):
            return self._inner.keep(tensor, hooks, argument)
        part = _part(tensor.detach(), self._group).requires_grad_()
        return _SplitTensor(self._inner.keep(part, hooks, argument), tensor, self._group)

    def keeps_memory(self, tensor: Tensor, argument: ArgumentName) -> bool:
        return not self._is_split(tensor, argument) and self._inner.keeps_memory(tensor, argument)

    def kept_bytes(self, tensor: Tensor, argument: ArgumentName) -> int:
        if self._is_split(tensor, argument):
            return _part_size(tensor, self._group) * tensor.element_size()
        return self._inner.kept_bytes(tensor, argument)

    def _is_split(self, tensor: Tensor, argument: ArgumentName) -> bool:
        if tensor.layout != torch.strided or not tensor.requires_grad:
            return False
        if argument not in self._is_same:
            is_same, is_constant = _compare(tensor, self._group)
            # Equal elements (zeros, at the start of a training) say nothing of the values of later calls.
            if is_same and is_constant:
                return False
            self._is_same[argument] = is_same
        return self._is_same[argument] and is_dense(tensor)


@final
class _SplitTensor:
    """This rank's part of a tensor, and the shape of the whole."""

    def __init__(self, part: "Kept", tensor: Tensor, group: Group) -> None:
        self._part, self._group = part, group
        self._shape, self._strides = tensor.shape, tensor.stride()

    def take(self) -> Tensor:
        part = self._part.take()
        whole = part.new_empty(len(part) * self._group.size)
        with self._group.ledger.about("checkpoints"):
            self._group.all_gather(whole, part)
        return whole.as_strided(self._shape, self._strides)


Kept = KeptTensor | _SplitTensor


def _part_size(tensor: Tensor, group: Group) -> int:
    return -(-tensor.numel() // group.size)


def _part(tensor: Tensor, group: Group) -> Tensor:
    flat = tensor.as_strided((tensor.numel(),), (1,))
    size = _part_size(flat, group)
    own = flat[size * group.rank : size * (group.rank + 1)]
    part = flat.new_zeros(size) if len(own) < size else flat.new_empty(size)
    part[: len(own)] = own
    return part


def _compare(tensor: Tensor, group: Group) -> tuple[bool, bool]:
    """Return whether all ranks have the same tensor, and all its elements are equal. Reads the device; all
    ranks must call it."""
    form = zlib.crc32(f"{tuple(tensor.shape)}{tensor.stride()}{tensor.dtype}".encode())
    own = torch.cat([device_fingerprint(tensor), torch.tensor([form], device=tensor.device)])
    is_same = (gather_rows(own, group, "checks") == own).all()
    flat = tensor.detach().flatten()
    is_same, is_constant = torch.stack([is_same, (flat == flat[:1]).all()]).tolist()
    return is_same, is_constant
