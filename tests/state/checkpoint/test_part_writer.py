"""Files that are written chunk by chunk, with chunks of two blocks of 4096 bytes."""

import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.state.checkpoint import file_checks, part_writer
from echelon.state.checkpoint.file_image import FileImage, lay_out
from echelon.state.checkpoint.manifest import FileRecord
from echelon.state.checkpoint.part_writer import FilledChunks, StoppedError, aligned_memory, write_memory
from echelon.state.ownership import whole_slice
from tests.state.checkpoint.small import hash_bytes

CPU = torch.device("cpu")
BLOCK = 4096


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_writer, "CHUNK_BYTES", 2 * BLOCK)
    monkeypatch.setattr(part_writer, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(file_checks, "BLOCK_BYTES", BLOCK)


class Sink:
    """Keeps what is written; fails at a chunk, if it is told."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.chunks: list[bytes] = []
        self.is_finished, self._fails_at = False, fails_at

    def write(self, memory: memoryview, count: int) -> None:
        assert len(memory) >= count
        if len(self.chunks) == self._fails_at:
            raise OSError("the disk is full")
        self.chunks.append(bytes(memory[:count]))

    def finish(self) -> None:
        self.is_finished = True

    def close(self) -> None:
        raise AssertionError("who has made it closes it")


def image_of(**tensors: Tensor) -> FileImage:
    boxes = [(whole_slice(name, tensor), tensor.dtype) for name, tensor in tensors.items()]
    (layout,) = lay_out(0, boxes)
    return FileImage(layout, lambda box: tensors[box.name])


@pytest.mark.parametrize("size", [1, 2 * BLOCK, 2 * BLOCK + 1, 6 * BLOCK, 13 * BLOCK + 5])
def test_memory_is_written_chunk_by_chunk(size: int) -> None:
    memory, sink, asked = aligned_memory(size), Sink(), []
    memory[:size] = torch.frombuffer(bytearray(os.urandom(size)), dtype=torch.uint8)
    data = memory[:size].numpy().tobytes()
    record = write_memory(sink, memory, size, lambda: bool(asked.append(1)))
    assert (b"".join(sink.chunks), record) == (data, FileRecord(size, hash_bytes(data)))
    assert [len(chunk) for chunk in sink.chunks[:-1]] == [2 * BLOCK] * (len(asked) - 1)
    assert sink.is_finished


def test_a_file_that_nobody_waits_for_is_not_finished() -> None:
    sink, answers = Sink(), iter((False, True))
    with pytest.raises(StoppedError):
        write_memory(sink, aligned_memory(6 * BLOCK), 6 * BLOCK, lambda: next(answers))
    assert (len(sink.chunks), sink.is_finished) == (1, False)


@pytest.mark.parametrize("elements", [1, 500, 5000, 9000])
def test_tensors_are_written_from_where_they_are(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """The largest goes through the three chunks more than once."""
    beats = []
    monkeypatch.setattr(part_writer, "beat", lambda: beats.append(1))
    tensors = {"a": torch.rand(elements, dtype=torch.float64), "b": torch.rand(7, elements).T}
    image = image_of(**tensors)
    expected = torch.empty(image.layout.size, dtype=torch.uint8)
    image_of(**tensors).fill(0, expected)
    data = expected.numpy().tobytes()
    chunks = FilledChunks(image.layout.size, CPU)
    for _ in range(2):  # with the same memory
        sink = Sink()
        assert chunks.write(sink, image_of(**tensors)) == FileRecord(len(data), hash_bytes(data))
        assert b"".join(sink.chunks) == data
        assert all(len(chunk) == 2 * BLOCK for chunk in sink.chunks[:-1])
        assert sink.is_finished
    assert len(beats) == 2 * len(sink.chunks)


def test_a_file_holds_three_chunks_of_memory_at_most() -> None:
    assert [len(memory) for memory in FilledChunks(10**9, CPU)._memory] == [2 * BLOCK] * 3
    assert [len(memory) for memory in FilledChunks(1, CPU)._memory] == [BLOCK] * 3


def test_a_chunk_is_hashed_block_by_block_while_it_is_in_the_cache() -> None:
    asked: list[tuple[int, int]] = []

    class Noting:
        def __init__(self, image: FileImage) -> None:
            self._image, self.layout = image, image.layout

        def fill(self, begin: int, out: Tensor) -> None:
            asked.append((begin, len(out)))
            self._image.fill(begin, out)

    image: Any = Noting(image_of(a=torch.zeros(3 * BLOCK, dtype=torch.uint8)))
    FilledChunks(image.layout.size, CPU).write(Sink(), image)
    rest = image.layout.size - 3 * BLOCK
    assert asked == [(0, BLOCK), (BLOCK, BLOCK), (2 * BLOCK, BLOCK), (3 * BLOCK, rest)]


@pytest.mark.parametrize("place", [0, 2])
def test_an_error_of_the_disk_is_raised_and_no_thread_stays(place: int) -> None:
    sink, before = Sink(fails_at=place), threading.active_count()
    image = image_of(a=torch.zeros(40 * BLOCK, dtype=torch.uint8))
    with pytest.raises(OSError, match="the disk is full"):
        FilledChunks(image.layout.size, CPU).write(sink, image)
    assert (len(sink.chunks), sink.is_finished, threading.active_count()) == (place, False, before)


def test_chunks_have_16_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [len(memory) for memory in FilledChunks(10**9, CPU)._memory] == [16 * 2**20] * 3
