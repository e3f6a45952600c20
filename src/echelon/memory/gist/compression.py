"""State that the layers of an engine share: how tensors are kept, and which memory holds many zeros or was
encoded already."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, final
from weakref import ref

import torch
from torch import Tensor

from echelon.memory.gist.floats import Parts

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
        """Return whether the values of a tensor at this address are still those."""
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


class Maker:
    """Writes an encoding, if its last one was read."""

    is_read = False  # whether its last output was saved


@final
class Fresh:
    """The last output of a ReLU."""

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self._maker: Maker | None = None
        self._parts: Parts | None = None
        self._num = 0
        self._output: ref[Tensor] | None = None

    def show(self, output: Tensor, maker: Maker, parts: Parts | None) -> None:
        """`parts`: its encoding, where one was written."""
        if self._maker is not None:
            self._maker.is_read = False  # the one before was not read
        self._memory, self._maker, self._parts = Memory(output), maker, parts
        self._num = output.numel()
        self._output = None if parts is None else ref(output, self._forget)

    def _forget(self, output: Any) -> None:
        if output is self._output:
            self._parts = self._output = None

    def take(self, tensor: Tensor, address: int) -> Parts | None:
        """The encoding of a tensor without gaps, if it is that output. It is given once."""
        memory, maker, parts = self._memory, self._maker, self._parts
        if memory is None or maker is None or memory.address != address or not memory.has(tensor):
            return None
        if tensor.numel() != self._num:  # a part of it
            return None
        maker.is_read = True
        self._memory = self._maker = self._parts = self._output = None
        return parts


# Bytes: below, the time of the host counts for more than the memory.
SMALLEST: Final = {"cpu": 256, "cuda": 2**23}


@final
@dataclass
class Compression:
    """`format`: in which numbers are kept; None: all bits are kept. `found`: kinds of encodings."""

    format: str | None
    marks: ZeroMarks = field(default_factory=ZeroMarks)
    found: set[str] = field(default_factory=set)
    fresh: Fresh = field(default_factory=Fresh)

    @classmethod
    def of(cls, compress: str) -> "Compression":
        """'gist' or 'gist-fp8'."""
        return cls(compress.partition("-")[2] or None)


def is_encoded(tensor: Tensor) -> bool:
    """Return whether a tensor is large enough, and a plain one of real numbers."""
    smallest = SMALLEST["cpu"] if tensor.is_cpu else SMALLEST["cuda"]
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.nbytes < smallest:
        return False
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


@contextmanager
def any_size() -> Iterator[None]:
    """Inside, small tensors of CUDA devices are encoded too. It is slow."""
    before = SMALLEST["cuda"]
    SMALLEST["cuda"] = SMALLEST["cpu"]
    try:
        yield
    finally:
        SMALLEST["cuda"] = before


_num_off = 0


def is_off() -> bool:
    return _num_off > 0


@contextmanager
def uncompressed() -> Iterator[None]:
    """Inside, everything is saved as it is: what is compared with one device is not rounded."""
    global _num_off
    _num_off += 1
    try:
        yield
    finally:
        _num_off -= 1
