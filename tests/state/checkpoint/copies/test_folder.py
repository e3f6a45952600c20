"""The folder of a run's copies: for one user, and gone when its run is."""

import errno
import gc
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from echelon.errors import UserError
from echelon.state.checkpoint.copies.folder import (
    Entry,
    MappedFile,
    MemoryFolder,
    forget_all,
    generation_of,
    host_name,
    memory_root,
    newest_step_here,
    remove_dead_folders,
    step_of,
    write_small,
)
from echelon.state.checkpoint.copies.keeper import Sending, num_files, receivers, sendings, whole_generations


def test_only_this_user_can_read_it(tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path / "run", tmp_path)
    folder.make(os.getpid())
    MappedFile(folder.file(0, 3), 100).memory.fill_(7)
    assert folder.file(0, 3).read_bytes() == b"\7" * 100
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.file(0, 3).stat().st_mode & 0o777 == 0o600


def test_links_and_folders_of_others_are_refused(tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path / "run", tmp_path)
    folder.path.symlink_to(tmp_path)
    with pytest.raises(UserError, match="must be a folder of this user, which no other can read"):
        folder.make(os.getpid())
    folder.path.unlink()
    folder.path.mkdir(mode=0o755)
    with pytest.raises(UserError, match="must be a folder of this user, which no other can read"):
        folder.make(os.getpid())
    other = MemoryFolder(tmp_path / "other", tmp_path)
    other.make(os.getpid())
    other.file(0, 0).symlink_to(tmp_path / "victim")
    with pytest.raises(UserError, match="cannot be written"):
        MappedFile(other.file(0, 0), 10)
    assert not (tmp_path / "victim").exists()


def test_what_a_dead_process_has_left_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    dead, alive, own = (MemoryFolder(tmp_path / name, tmp_path) for name in ("dead", "alive", "own"))
    dead.make(ended.pid)
    own.make(ended.pid)
    alive.make(os.getpid())
    ended.wait()
    remove_dead_folders(lambda _: False, tmp_path, keep=own.path)
    assert not dead.path.exists()
    assert alive.path.exists()
    assert own.path.exists()


def test_copies_of_a_run_that_can_be_resumed_stay_for_a_week(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    names = ("killed", "finished", "old", "readable by others", "of another run", "line\nbreak\udcff")
    folders = {name: MemoryFolder(tmp_path / name, tmp_path) for name in names}
    for folder in folders.values():
        folder.make(ended.pid)
    ended.wait()
    eight_days_ago = time.time() - 8 * 24 * 3600
    for slot in (0, 1):
        os.utime(folders["old"].slot(slot), (eight_days_ago, eight_days_ago))
    folders["readable by others"].path.chmod(0o755)
    (folders["of another run"].path / "owner").write_bytes((folders["killed"].path / "owner").read_bytes())
    remove_dead_folders(lambda run: run.parent == tmp_path and run.name != "finished", tmp_path)
    assert [name for name in names if folders[name].path.exists()] == ["killed", "line\nbreak\udcff"]


def test_the_last_whole_generation_is_not_written_over(tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path / "run", tmp_path)
    folder.make(os.getpid())
    kept, late = generation_of(10, "a" * 16), generation_of(20, "b" * 16)
    for slot, generation in ((0, kept), (1, late)):
        folder.manifest(Entry(0, generation, slot)).write_bytes(b"")
    assert newest_step_here(folder, 1) == 20
    assert newest_step_here(folder, 2) == 0
    assert folder.free_slot(0, kept) == 1
    assert folder.entries() == [Entry(0, kept, 0)]


def test_a_small_ram_disk_is_refused_with_its_bytes(tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path / "run", tmp_path)
    folder.make(os.getpid())
    with pytest.raises(UserError, match=r"3 states of 1024.0 TiB are kept twice, which takes 6144.0 TiB"):
        folder.check_room(2.0**50, 3)
    folder.check_room(1, 3)


def test_what_lies_there_already_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = MemoryFolder(tmp_path / "run", tmp_path)
    folder.make(os.getpid())
    for generation in (3, 4):
        MappedFile(folder.file(0, generation), 500)
    used = sum(path.stat().st_size for path in folder.path.rglob("*"))
    assert used >= 1000
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=100))
    folder.check_room((1000 + used) / 4, 2)
    with pytest.raises(UserError, match="2 states of"):
        folder.check_room((1000 + used) / 4 + 1, 2)


def test_each_copy_goes_to_the_next_host() -> None:
    assert receivers(["a", "a"]) == [None, None]
    assert receivers(["a", "a", "b", "b", "c", "c"]) == [2, 3, 4, 5, 0, 1]
    assert receivers(["a", "a", "b"]) == [2, 2, 0]
    assert num_files("b", ["a", "a", "b"], [2, 2, 0]) == 3
    assert num_files("a", ["a", "a"], [None, None]) == 2


def test_a_generation_is_whole_if_some_host_has_each_file() -> None:
    new, old = generation_of(20, "a" * 16), generation_of(10, "b" * 16)
    found = [{new: [0, 1], old: [0, 1]}, {new: [], old: [1, 0]}]
    assert whole_generations(found) == [new, old]
    assert sendings(new, found) == [Sending(0, 1)]
    assert sendings(old, found) == []
    assert whole_generations([{new: [0]}, {new: [0], old: [1]}]) == []


def test_names_in_a_folder(tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path / "run", tmp_path)
    digest = hashlib.sha256(os.fsencode(tmp_path / "run")).hexdigest()[:16]
    assert folder.path == tmp_path / f"echelon-memory-{os.getuid()}-{digest}"
    generation = generation_of(100, "0123456789abcdef")
    assert (generation, step_of(generation)) == ("00000100-0123456789abcdef", 100)
    assert folder.manifest(Entry(3, generation, 1)) == folder.slot(1) / f"rank-00003.{generation}.json"
    assert folder.file(0, 3) == folder.path / "generation-0" / "rank-00003.safetensors"


def test_who_owns_a_folder(tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path / "run", tmp_path)
    folder.make(os.getpid())
    folder.make(os.getpid())  # as a further attempt does
    assert sorted(path.name for path in folder.path.iterdir()) == ["generation-0", "generation-1", "owner"]
    owner, _, run = (folder.path / "owner").read_bytes().partition(b"\n")
    began = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19]
    assert owner.decode() == f"{os.readlink('/proc/self/ns/pid')} {os.getpid()} {began}"
    assert run == os.fsencode(tmp_path / "run")
    assert {path.stat().st_mode & 0o777 for path in folder.path.glob("gen*")} == {0o700}
    assert (folder.path / "owner").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("process", "is_removed"),
    [
        ("{namespace} 999999999 7", True),  # there is none
        ("{namespace} {pid} 7", True),  # another one had this number
        ("{namespace} {pid} {began}", False),
        ("pid:[7] 999999999 7", False),  # of a container, which cannot be seen
        ("{namespace} x 7", False),
        ("{namespace}", False),
        ("", False),
    ],
)
def test_a_folder_goes_if_its_process_is_surely_dead(tmp_path: Path, process: str, is_removed: bool) -> None:
    folder = MemoryFolder(tmp_path / "run", tmp_path)
    folder.make(os.getpid())
    namespace, pid, began = (folder.path / "owner").read_text().partition("\n")[0].split()
    text = process.format(namespace=namespace, pid=pid, began=began)
    (folder.path / "owner").write_text(f"{text}\n{tmp_path / 'run'}")
    remove_dead_folders(lambda _: False, tmp_path)
    assert folder.path.exists() is not is_removed


def test_copies_stay_for_seven_days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = MemoryFolder(tmp_path / "run", tmp_path)
    folder.make(os.getpid())
    text = (folder.path / "owner").read_text().replace(f" {os.getpid()} ", " 999999999 ")
    (folder.path / "owner").write_text(text)
    for slot, moment in ((0, 1000.0), (1, 5000.0)):
        os.utime(folder.slot(slot), (moment, moment))
    assert folder.changed() == 5000.0
    for later, is_there in ((7 * 24 * 3600 - 1, True), (7 * 24 * 3600, False)):
        monkeypatch.setattr(time, "time", lambda later=later: 5000.0 + later)
        remove_dead_folders(lambda _: True, tmp_path)
        assert folder.path.exists() is is_there
    folder.remove()  # though nothing is there
    assert folder.changed() == 0.0


def test_where_memory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_MEMORY_FOLDER", str(tmp_path))
    assert memory_root() == tmp_path
    assert MemoryFolder(tmp_path / "run").path.parent == tmp_path
    assert host_name(tmp_path) == host_name(tmp_path / "." / "")
    (tmp_path / "other").mkdir()
    assert host_name(tmp_path / "other") != host_name(tmp_path)
    monkeypatch.setenv("ECHELON_MEMORY_FOLDER", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="nowhere is not a folder; set ECHELON_MEMORY_FOLDER"):
        memory_root()
    with pytest.raises(UserError, match=r"cannot make .*: No such file or directory; set ECHELON_MEMORY"):
        MemoryFolder(tmp_path / "run", tmp_path / "nowhere").make(os.getpid())


def test_a_small_file_is_written_over_what_a_killed_process_has_left(tmp_path: Path) -> None:
    left = tmp_path / f".a.{os.getpid()}.part"
    left.write_text("half of it, and more")
    write_small(tmp_path / "a", b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert not left.exists()


def test_a_slot_of_another_rank_is_not_used_up(tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path / "run", tmp_path)
    folder.make(os.getpid())
    kept = generation_of(10, "a" * 16)
    for rank in (0, 1):
        folder.manifest(Entry(rank, kept, rank)).write_bytes(b"")
    assert (folder.free_slot(0, kept), folder.free_slot(1, kept), folder.free_slot(2, kept)) == (1, 0, 0)
    assert len(folder.entries()) == 2
    assert folder.free_slot(0, None) == 0
    assert folder.entries() == [Entry(1, kept, 1)], "that of rank 0 is being written over"
    assert (newest_step_here(folder, 1), newest_step_here(folder, 2)) == (10, 0)
    folder.forget(Entry(0, kept, 0))  # again
    forget_all(folder)
    assert folder.entries() == []
    assert newest_step_here(folder, 0) == 0


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
