"""Files that are written chunk by chunk, with chunks of two blocks of 4096 bytes."""

import errno
import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.state.checkpoint import file_checks, part_writer
from echelon.state.checkpoint.file_checks import BLOCK_BYTES, FileHash, hash_file
from echelon.state.checkpoint.manifest import FileRecord
from echelon.state.checkpoint.part_writer import (
    ALIGNMENT,
    DirectFile,
    FileImage,
    FileLayout,
    FilledChunks,
    StoppedError,
    aligned_memory,
    lay_out,
    write_memory,
)
from echelon.state.ownership import Slice, whole_slice
from tests.state.checkpoint.saving import state
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


def layout_of(tensors: dict[str, Tensor], **options: int) -> list[FileLayout]:
    return lay_out(
        0, [(whole_slice(name, tensor), tensor.dtype) for name, tensor in tensors.items()], **options
    )


def image_bytes(layout: FileLayout, tensors: dict[str, Tensor], chunk: int) -> bytes:
    image = FileImage(layout, lambda box: tensors[box.name])
    parts = []
    for begin in range(0, layout.size, chunk):
        out = torch.full((min(chunk, layout.size - begin),), 255, dtype=torch.uint8)
        image.fill(begin, out)
        parts.append(out.numpy().tobytes())
    return b"".join(parts)


def test_all_chunks_make_the_same_file() -> None:
    from safetensors.torch import load

    (layout,) = layout_of(state())
    whole = image_bytes(layout, state(), layout.size)
    assert len(whole) == layout.size
    assert all(torch.equal(load(whole)[f"{name}/value"], tensor) for name, tensor in state().items())
    for chunk in (1, 7, 64, 1000):
        assert image_bytes(layout, state(), chunk) == whole


def test_a_rank_begins_another_file_at_the_limit() -> None:
    tensors = {f"t{number}": torch.zeros(10) for number in range(5)} | {"large": torch.zeros(100)}
    files = layout_of(tensors, limit=100)
    assert [[box.slice.name for box in file.boxes] for file in files] == [
        ["t0", "t1"],
        ["t2", "t3"],
        ["t4"],
        ["large"],
    ]
    assert [file.name for file in files][:2] == ["rank-00000.safetensors", "rank-00000-2.safetensors"]


def test_boxes_of_one_tensor_have_names_of_their_own() -> None:
    boxes = [Slice("w", "value", (4, 2), (row, 0), (2, 2)) for row in (0, 2)]
    (layout,) = lay_out(3, [(box, torch.float32) for box in boxes])
    assert layout.name == "rank-00003.safetensors"
    assert [box.tensor for box in layout.boxes] == ["w/value@0,0", "w/value@2,0"]


def written(path: Path, data: bytes, chunk: int) -> bytes:
    memory = aligned_memory(len(data))
    memory[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    file = DirectFile(path)
    for begin in range(0, len(data), chunk):
        file.write(memory.numpy().data[begin:], min(chunk, len(data) - begin))
    file.finish()
    file.close()
    return path.read_bytes()


@pytest.mark.parametrize("size", [1, ALIGNMENT, ALIGNMENT + 1, 3 * ALIGNMENT - 1])
def test_a_direct_file_has_its_bytes_alone(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    assert written(tmp_path / "a", data, ALIGNMENT) == data


@pytest.mark.parametrize("refuses", ["open", "write"])
def test_a_file_system_without_direct_writes(
    tmp_path: Path, refuses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, real_write, refused = os.open, os.write, []

    def refuse(name: str) -> None:
        refused.append(name)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def open_without(path: Any, flags: int, *rest: Any) -> int:
        if refuses == "open" and flags & os.O_DIRECT:
            os.close(real_open(path, flags & ~os.O_DIRECT, *rest))
            refuse("open")
        return real_open(path, flags, *rest)

    def write_without(file: int, data: memoryview) -> int:
        import fcntl

        if refuses == "write" and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            refuse("write")
        return real_write(file, data)

    monkeypatch.setattr(part_writer.os, "open", open_without)
    monkeypatch.setattr(part_writer.os, "write", write_without)
    data = os.urandom(2 * ALIGNMENT + 5)
    assert written(tmp_path / "a", data, ALIGNMENT) == data
    assert refused == [refuses]


def test_the_hash_of_parts_is_that_of_the_file(tmp_path: Path) -> None:
    data = os.urandom(9 * BLOCK_BYTES + 5)  # of which several threads read parts
    (tmp_path / "file").write_bytes(data)
    with (tmp_path / "file").open("rb") as file:
        assert hash_file(file) == hash_bytes(data)
    found = FileHash()
    found.update(memoryview(data)[:BLOCK_BYTES])
    found.update(memoryview(data)[BLOCK_BYTES:])
    assert found.hexdigest() == hash_bytes(data)
    with pytest.raises(AssertionError, match="did not end with a block"):
        found.update(memoryview(data))


def test_a_hash_finds_every_flipped_bit_and_exchanged_blocks() -> None:
    data = bytearray(os.urandom(64)) + bytearray(BLOCK_BYTES) + bytearray(os.urandom(64))
    expected = hash_bytes(data)
    for bit in range(0, 64 * 8, 7):
        data[bit // 8] ^= 1 << bit % 8
        assert hash_bytes(data) != expected
        data[bit // 8] ^= 1 << bit % 8
    blocks = [os.urandom(BLOCK_BYTES) for _ in range(2)]
    assert hash_bytes(b"".join(blocks)) != hash_bytes(b"".join(blocks[::-1]))


def test_a_file_is_filled_to_its_limit() -> None:
    tensors = {f"t{number}": torch.zeros(10) for number in range(5)}  # of 40 bytes
    for limit, expected in ((79, [1] * 5), (80, [2, 2, 1]), (119, [2, 2, 1]), (120, [3, 2])):
        assert [len(file.boxes) for file in layout_of(tensors, limit=limit)] == expected
    assert lay_out(0, []) == []
    halves = [Slice(name, "value", (2**31,), (0,), (2**31,)) for name in "ab"]  # without memory
    assert len(lay_out(0, [(box, torch.uint8) for box in halves])) == 1
    more = Slice("c", "value", (1,), (0,), (1,))
    assert [len(file.boxes) for file in lay_out(0, [(box, torch.uint8) for box in (*halves, more)])] == [2, 1]


def test_one_tensor_is_copied_at_a_time() -> None:
    tensors = {"a": torch.rand(5, 4).T, "b": torch.rand(3, 4).T}  # which do not lie in one piece
    made: list[weakref.ref[Tensor]] = []

    def tensor_of(box: Slice) -> Tensor:
        assert all(reference() is None for reference in made)
        tensor = tensors[box.name].clone()
        made.append(weakref.ref(tensor))
        return tensor

    (layout,) = layout_of(tensors)
    image = FileImage(layout, tensor_of)
    for begin in range(0, layout.size, 8):
        image.fill(begin, torch.empty(min(8, layout.size - begin), dtype=torch.uint8))
    assert len(made) == 2, "each is made once, whatever the chunks"


def test_empty_tensors_are_never_made() -> None:
    tensors = {"a": torch.rand(2), "empty": torch.rand(0, 3), "b": torch.rand(2)}
    (layout,) = layout_of(tensors)
    asked: list[str] = []

    def tensor_of(box: Slice) -> Tensor:
        asked.append(box.name)
        return tensors[box.name]

    FileImage(layout, tensor_of).fill(0, torch.empty(layout.size, dtype=torch.uint8))
    assert asked == ["a", "b"]


def test_memory_for_direct_writes_begins_at_a_page() -> None:
    assert ALIGNMENT == 4096
    for count, size in ((1, 4096), (4096, 4096), (4097, 8192)):
        memory = aligned_memory(count)
        assert (len(memory), memory.data_ptr() % 4096, memory.is_pinned()) == (size, 0, False)


def test_a_direct_file_is_new_readable_and_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(part_writer.os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    gc.collect()  # what others have left open is not closed meanwhile
    descriptors = len(os.listdir("/proc/self/fd"))
    assert written(tmp_path / "a", b"x" * 5000, ALIGNMENT) == b"x" * 5000
    assert synced == [5000], "after what is too much was cut off"
    assert len(os.listdir("/proc/self/fd")) == descriptors
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666 & ~mask
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "a")


def test_only_the_last_chunk_may_end_inside_a_page(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "a")
    memory = aligned_memory(2 * ALIGNMENT).numpy().data
    file.write(memory, 5)
    with pytest.raises(AssertionError, match="only the last chunk"):
        file.write(memory, 5)
    file.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EINVAL])
def test_other_errors_of_writes_are_raised(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a second refusal, where the first was not about direct writes."""

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    file = DirectFile(tmp_path / "a")
    monkeypatch.setattr(part_writer.os, "write", fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        file.write(aligned_memory(10).numpy().data, 10)
    file.close()
