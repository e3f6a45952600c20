"""What the layers of an engine share: how tensors are kept, and what has many zeros."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, final

import torch
from torch import Tensor

from echelon.memory.gist.fresh import Fresh
from echelon.memory.gist.marks import ZeroMarks

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
    """Whether a tensor is large enough, and a plain one of real numbers."""
    smallest = SMALLEST["cpu"] if tensor.is_cpu else SMALLEST["cuda"]
    if tensor.nbytes < smallest or type(tensor) is not Tensor or not tensor.is_floating_point():
        return False
    return tensor.layout is torch.strided and tensor.dtype.itemsize > 1


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
