"""One file of a checkpoint, written chunk by chunk and hashed beside it.

    FilledChunks    for a save that waits: this thread fills and hashes a chunk while another one writes
    write_memory    for a copy that is in memory already
    DirectFile      a file on disk, written from aligned memory past the page cache where the file system can

The page cache would cost more processor time than all the rest of a save, and push out what training reads.
"""

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, final

import torch
from torch import Tensor

from echelon.launching import beat
from echelon.state.checkpoint.file_checks import BLOCK_BYTES, FileHash
from echelon.state.checkpoint.file_image import FileImage
from echelon.state.checkpoint.manifest import FileRecord

CHUNK_BYTES = 4 * BLOCK_BYTES
_CHUNKS = 3  # one is filled, one is written, one waits
ALIGNMENT = 4096
_DIRECT: int = getattr(os, "O_DIRECT", 0)  # not on macOS


def round_up(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def aligned_memory(count: int, *, pinned: bool = False) -> Tensor:
    """Allocate host memory at an address that a direct write can take; `count` bytes are rounded up."""
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


class Sink(Protocol):
    """A file that is being written: a DirectFile, or an object of remote storage."""

    def write(self, memory: memoryview, count: int) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class StoppedError(Exception):
    """The save was given up, so this file is not written to its end."""


def write_memory(sink: Sink, memory: Tensor, size: int, stop: Callable[[], bool]) -> FileRecord:
    """Write the first `size` bytes of memory that has whole pages."""
    found, data = FileHash(), memory.numpy().data
    for begin in range(0, size, CHUNK_BYTES):
        if stop():
            raise StoppedError
        count = min(CHUNK_BYTES, size - begin)
        found.update(data[begin : begin + count])
        sink.write(data[begin:], count)
    sink.finish()
    return FileRecord(size, found.hexdigest())


class FilledChunks:
    """Memory for chunks, used for one file after the other."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate chunks for files of at most `size` bytes."""
        pinned = device.type == "cuda"
        self._device = device
        self._memory = [aligned_memory(min(CHUNK_BYTES, size), pinned=pinned) for _ in range(_CHUNKS)]

    def write(self, sink: Sink, image: FileImage) -> FileRecord:
        free: SimpleQueue[Tensor] = SimpleQueue()
        for memory in self._memory:
            free.put(memory)
        filled: SimpleQueue[tuple[Tensor, int] | None] = SimpleQueue()
        errors: list[Exception] = []
        writer = threading.Thread(target=_write_all, args=(sink, filled, free, errors), daemon=True)
        writer.start()
        size, found = image.layout.size, FileHash()
        try:
            for begin in range(0, size, CHUNK_BYTES):
                # Waits for the writer if it is slower: no more than the three chunks are in memory.
                memory, count = free.get(), min(CHUNK_BYTES, size - begin)
                if errors:
                    break
                self._fill(image, begin, memory[:count], found)
                filled.put((memory, count))
                beat()
        finally:
            filled.put(None)
            writer.join()
        if errors:
            raise errors[0]
        sink.finish()
        return FileRecord(size, found.hexdigest())

    def _fill(self, image: FileImage, begin: int, chunk: Tensor, found: FileHash) -> None:
        """Fill a chunk and hash it; on a CPU block by block, while each is in the cache."""
        is_gpu = self._device.type == "cuda"
        for offset in range(0, len(chunk), len(chunk) if is_gpu else BLOCK_BYTES):
            part = chunk[offset:] if is_gpu else chunk[offset : offset + BLOCK_BYTES]
            image.fill(begin + offset, part)
            if is_gpu:  # the copy to pinned memory is asynchronous, and the hash reads it on the host
                torch.cuda.current_stream(self._device).synchronize()
            found.update(part.numpy().data)


def _write_all(
    sink: Sink,
    filled: "SimpleQueue[tuple[Tensor, int] | None]",
    free: "SimpleQueue[Tensor]",
    errors: list[Exception],
) -> None:
    """Write chunks, in a thread. After an error it only gives memory back, so that the filler never waits."""
    while (chunk := filled.get()) is not None:
        memory, count = chunk
        try:
            if not errors:
                sink.write(memory.numpy().data, count)
        except Exception as error:
            errors.append(error)
        free.put(memory)
