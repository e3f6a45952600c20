"""Which memory holds many zeros, or was encoded already: storages by their address, as long as they live."""

from collections import OrderedDict
from typing import final

import torch
from torch import Tensor

_free_reference = torch.UntypedStorage._free_weak_ref
_MOST = 64  # storages; those of longer ago are no longer marked


@final
class Memory:
    """A storage as it is now. The weak reference keeps its address from being used again."""

    __slots__ = ("_reference", "_version", "address")

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.address, self._version = int(storage._cdata), tensor._version
        self._reference = storage._weak_ref()

    def has(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor at this address are still those."""
        return self._version == tensor._version

    def __del__(self) -> None:
        _free_reference(self._reference)  # type: ignore[no-untyped-call]


@final
class ZeroMarks:
    """Storages in which many elements are zero."""

    def __init__(self) -> None:
        self._memories: OrderedDict[int, Memory] = OrderedDict()

    def mark(self, tensor: Tensor) -> None:
        memory = Memory(tensor)
        self._memories[memory.address] = memory
        if len(self._memories) > _MOST:
            self._memories.popitem(last=False)

    def has(self, tensor: Tensor) -> bool:
        memory = self._memories.get(int(tensor.untyped_storage()._cdata))
        return memory is not None and memory.has(tensor)

    def __reduce__(self) -> tuple[type["ZeroMarks"], tuple[()]]:
        return ZeroMarks, ()  # a copy of a model has other memory
