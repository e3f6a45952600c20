"""Files on a RAM disk as tensors."""

import errno
import gc
import os
from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.state.checkpoint.copies.mapped_file import MappedFile


def test_memory_of_the_same_size_is_written_again(tmp_path: Path) -> None:
    first = MappedFile(tmp_path / "a", 100)
    first.memory.fill_(7)
    number = (tmp_path / "a").stat().st_ino
    again = MappedFile(tmp_path / "a", 100)
    assert (again.memory.tolist(), (tmp_path / "a").stat().st_ino) == ([7] * 100, number)
    assert (again.path, again.size) == (tmp_path / "a", 100)
    other = MappedFile(tmp_path / "a", 101)
    assert (other.memory.tolist(), (tmp_path / "a").stat().st_size) == ([0] * 101, 101)
    assert first.memory.tolist() == [7] * 100, "who has the old file keeps it"


def test_no_file_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # what others have left open is not closed meanwhile
    files = [MappedFile(tmp_path / "a", size) for size in (100, 100)]
    before = len(os.listdir("/proc/self/fd"))
    files += [MappedFile(tmp_path / "a", 100), MappedFile(tmp_path / "a", 200)]
    mapped = len(os.listdir("/proc/self/fd")) - before
    assert mapped == 2, "a mapping holds one of its own"

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UserError, match=r"has no room for the 300 B of b; make that RAM disk larger"):
        MappedFile(tmp_path / "b", 300)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not (tmp_path / "b").exists()
    with pytest.raises(UserError, match="nowhere/a cannot be written: No such file"):
        MappedFile(tmp_path / "nowhere" / "a", 300)
