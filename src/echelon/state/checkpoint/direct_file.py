"""A file that is written from aligned memory, past the page cache where the file system can do that.

The cache would cost more processor time than all the rest of a save, and push out what training reads.
"""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import final

import torch
from torch import Tensor

ALIGNMENT = 4096
_DIRECT: int = getattr(os, "O_DIRECT", 0)  # not on macOS


def round_up(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def aligned_memory(count: int, *, pinned: bool = False) -> Tensor:
    """Bytes of host memory at an address that a direct write can take; `count` is rounded up."""
    memory = torch.empty(round_up(count) + ALIGNMENT, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    begin = -memory.data_ptr() % ALIGNMENT
    return memory[begin : begin + round_up(count)]


@final
class DirectFile:
    """A new file. Chunks are written in order from aligned memory; each but the last is of whole pages.

    A chunk must lie in memory that goes on to the end of its last page: what is there is cut off again.
    """

    def __init__(self, path: Path) -> None:
        self._size = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            self._descriptor = os.open(path, flags | _DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            with suppress(FileNotFoundError):
                path.unlink()  # some file systems refuse it after they have made the file
            self._descriptor = os.open(path, flags, 0o666)

    def write(self, memory: memoryview, count: int) -> None:
        """Write `count` bytes; `memory` has whole pages."""
        assert self._size % ALIGNMENT == 0, "only the last chunk may end inside a page"
        rest = memory[: round_up(count)]
        while rest:
            rest = rest[self._write_some(rest) :]
        self._size += count

    def _write_some(self, memory: memoryview) -> int:
        try:
            return os.write(self._descriptor, memory)
        except OSError as error:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & _DIRECT:
                raise
        # Not on this file system, or a disk that is nearly full took a part of a page.
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        return os.write(self._descriptor, memory)

    def finish(self) -> None:
        """Return when all of it is on the disk."""
        os.ftruncate(self._descriptor, self._size)
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
