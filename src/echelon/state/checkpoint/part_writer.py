"""One file of a checkpoint, written chunk by chunk and hashed beside it.

    FilledChunks    for a save that waits: this thread fills and hashes a chunk while another one writes
    write_memory    for a copy that is in memory already

Neither holds more than its chunks.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from echelon.launching import beat
from echelon.state.checkpoint.direct_file import aligned_memory
from echelon.state.checkpoint.file_hash import BLOCK_BYTES, FileHash
from echelon.state.checkpoint.file_image import FileImage
from echelon.state.checkpoint.manifest import FileRecord

CHUNK_BYTES = 4 * BLOCK_BYTES
_CHUNKS = 3  # one is filled, one is written, one waits


class Sink(Protocol):
    """Where the bytes of a file go: a DirectFile, or an object of remote storage."""

    def write(self, memory: memoryview, count: int) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class StoppedError(Exception):
    """Nobody waits for this file any more."""


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
        """`size`: of the largest file."""
        pinned = device.type == "cuda"
        self._device = device
        self._memory = [aligned_memory(min(CHUNK_BYTES, size), pinned=pinned) for _ in range(_CHUNKS)]

    def write(self, sink: Sink, image: FileImage) -> FileRecord:
        """Write a file whose tensors are wherever they are."""
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
            if is_gpu:
                torch.cuda.current_stream(self._device).synchronize()
            found.update(part.numpy().data)


def _write_all(
    sink: Sink,
    filled: "SimpleQueue[tuple[Tensor, int] | None]",
    free: "SimpleQueue[Tensor]",
    errors: list[Exception],
) -> None:
    """The writing thread. After an error it only gives the memory back."""
    while (chunk := filled.get()) is not None:
        memory, count = chunk
        try:
            if not errors:
                sink.write(memory.numpy().data, count)
        except Exception as error:
            errors.append(error)
        free.put(memory)
