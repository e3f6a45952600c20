"""The hash of a file, with blocks of a few bytes."""

import hashlib
import os
from pathlib import Path

import pytest
from xxhash import xxh3_64_digest

from echelon.state.checkpoint import file_checks
from echelon.state.checkpoint.file_checks import FileHash, hash_file
from tests.state.checkpoint.small import hash_bytes


def by_hand(data: bytes, block: int) -> str:
    blocks = [data[begin : begin + block] for begin in range(0, len(data), block)]
    return hashlib.sha256(b"".join(map(xxh3_64_digest, blocks))).hexdigest()


def test_a_block_has_four_megabytes() -> None:
    data = bytes(2**22) + b"x"
    assert hash_bytes(data) == by_hand(data, 2**22)


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 bytes, and parts of two."""
    monkeypatch.setattr(file_checks, "BLOCK_BYTES", 8)
    monkeypatch.setattr(file_checks, "_PART_BYTES", 16)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 17, 24, 31, 32, 33, 100])
@pytest.mark.parametrize("cores", [1, 64])
def test_files_of_all_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, cores: int) -> None:
    monkeypatch.setattr(file_checks, "usable_cores", lambda: cores)
    beats = []
    monkeypatch.setattr(file_checks, "beat", lambda: beats.append(1))
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    with (tmp_path / "file").open("rb") as file:
        assert hash_file(file) == by_hand(data, 8) == hash_bytes(data)
    assert len(beats) == -(-size // 8), "a sign of life for each block"


@pytest.mark.usefixtures("_small_blocks")
def test_only_the_last_part_ends_inside_a_block() -> None:
    for sizes in ((8, 16, 3), (8, 0), (3, 0), (0, 8), (16, 8, 0)):
        data, found = os.urandom(sum(sizes)), FileHash()
        begin = 0
        for size in sizes:
            found.update(memoryview(data)[begin : begin + size])
            begin += size
        assert found.hexdigest() == by_hand(data, 8)
    for size in (1, 7, 9, 15):
        found = FileHash()
        found.update(memoryview(bytes(size)))
        with pytest.raises(AssertionError, match="did not end with a block"):
            found.update(memoryview(b"x"))


@pytest.mark.usefixtures("_small_blocks")
def test_reads_that_stop_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, preadv = os.urandom(29), os.preadv
    (tmp_path / "file").write_bytes(data)
    monkeypatch.setattr(os, "preadv", lambda file, parts, begin: preadv(file, [parts[0][:3]], begin))
    with (tmp_path / "file").open("rb") as file:
        assert hash_file(file) == by_hand(data, 8)
        monkeypatch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(OSError, match="became shorter while it was read"):
            hash_file(file)


def test_four_threads_read_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, sizes = [], []
    executor = file_checks.ThreadPoolExecutor

    def make(number: int) -> object:
        numbers.append(number)
        return executor(number)

    def checks(_: int, begin: int, size: int) -> bytes:
        sizes.append((begin, size))
        return b""

    monkeypatch.setattr(file_checks, "ThreadPoolExecutor", make)
    monkeypatch.setattr(file_checks, "_checks", checks)
    for mebibytes, cores in ((0, 64), (16, 64), (17, 64), (160, 64), (160, 2)):
        (tmp_path / "file").touch()
        os.truncate(tmp_path / "file", mebibytes * 2**20)
        monkeypatch.setattr(file_checks, "usable_cores", lambda cores=cores: cores)
        with (tmp_path / "file").open("rb") as file:
            hash_file(file)
    assert numbers == [1, 1, 2, 4, 2]
    assert sorted(sizes[:3]) == [(0, 2**24), (0, 2**24), (2**24, 2**20)]
