"""One file of a checkpoint: its bytes before they are written, then written chunk by chunk and hashed.

    FileImage       a header, then tensors one behind the other. Any range can be made by itself, so that a
                    file is written from a small buffer, or from a copy of all of it:

                        image     header | a            | b    | c               |
                        chunks    |  0      |  1      |  2      |  3      |  4   |

    FilledChunks    for a save that waits: this thread fills and hashes a chunk while another one writes
    write_memory    for a copy that is in memory already
    DirectFile      a file on disk, written from aligned memory past the page cache where the file system can

The page cache would cost more processor time than all the rest of a save, and push out what training reads.
"""

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from echelon.collectives.buffer_layout import portions
from echelon.launching import beat
from echelon.state.checkpoint.file_checks import BLOCK_BYTES, FileHash
from echelon.state.checkpoint.manifest import FileRecord
from echelon.state.ownership import Slice
from echelon.state.weight_files.tensor_file import TensorEntry, make_header

FILE_BYTES = 4 << 30  # a rank begins another file when one has so many


class StoredBox(NamedTuple):
    """A box that a file holds, under a name of its own; `begin` is where in the file."""

    slice: Slice
    dtype: torch.dtype
    tensor: str
    begin: int

    @property
    def nbytes(self) -> int:
        return self.slice.numel * self.dtype.itemsize


class FileLayout(NamedTuple):
    """The contents of a file of a checkpoint, in the order of its bytes."""

    name: str
    header: bytes
    boxes: tuple[StoredBox, ...]
    size: int


def lay_out(
    rank: int, boxes: Sequence[tuple[Slice, torch.dtype]], limit: int = FILE_BYTES
) -> list[FileLayout]:
    """Lay out the files of what a rank writes; every rank computes the same for each."""
    parts = portions(boxes, lambda pair: pair[0].numel * pair[1].itemsize, limit)
    return [
        _layout(f"rank-{rank:05d}{f'-{number + 1}' if number else ''}.safetensors", part)
        for number, part in enumerate(parts)
    ]


def _layout(name: str, boxes: Sequence[tuple[Slice, torch.dtype]]) -> FileLayout:
    entries = {}
    for box, dtype in boxes:
        place = "" if box.is_whole else "@" + ",".join(map(str, box.offsets))
        entries[f"{box.name}/{box.part}{place}"] = (box, dtype)
    header, begins = make_header([TensorEntry(n, box.sizes, dtype) for n, (box, dtype) in entries.items()])
    placed = sorted(
        (StoredBox(box, dtype, n, begins[n]) for n, (box, dtype) in entries.items()),
        key=lambda box: box.begin,
    )
    end = max((box.begin + box.nbytes for box in placed), default=len(header))
    return FileLayout(name, header, tuple(placed), end)


@final
class FileImage:
    """Makes the bytes of a file. Ranges must be asked for in order: one tensor that does not lie in a piece
    is copied at a time, and kept until the next."""

    def __init__(self, layout: FileLayout, tensor_of: Callable[[Slice], Tensor]) -> None:
        self.layout, self._tensor_of = layout, tensor_of
        self._first = 0  # of the boxes that do not end before the next range
        self._bytes: tuple[int, Tensor] | None = None

    def fill(self, begin: int, out: Tensor) -> None:
        """Fill host memory with the bytes from `begin` on; returns when they are there, unless the tensors
        are on a device and `out` is pinned: then when the current stream has done it."""
        end, is_pinned = begin + len(out), out.is_pinned()
        header = self.layout.header[begin:end]
        if header:
            out[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        while self._first < len(self.layout.boxes):
            box = self.layout.boxes[self._first]
            low, high = max(begin, box.begin), min(end, box.begin + box.nbytes)
            if low < high:
                part = self._flat(self._first)[low - box.begin : high - box.begin]
                out[low - begin : high - begin].copy_(part, non_blocking=is_pinned)
            if box.begin + box.nbytes > end:  # the next range begins inside this box
                return
            self._first += 1

    def _flat(self, index: int) -> Tensor:
        if self._bytes is None or self._bytes[0] != index:
            self._bytes = None  # before the next one is made
            self._bytes = index, as_bytes(self._tensor_of(self.layout.boxes[index].slice))
        return self._bytes[1]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, in order; a copy of one that does not lie in one piece."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


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
