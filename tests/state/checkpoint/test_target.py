"""The temporary place of a checkpoint: what is left of a killed job goes, what a living one writes stays."""

import errno
import fcntl
import io
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from echelon.errors import UserError
from echelon.launching import RankFailed, launch
from echelon.state.checkpoint import atomic, storage_errors, target
from echelon.state.checkpoint.atomic import locate, remove_small_leftovers
from echelon.state.checkpoint.manifest import FileRecord
from echelon.state.checkpoint.target import (
    RemoteFile,
    remote_sizes,
    remove_leftovers,
    target_at,
)
from tests.state.checkpoint.saving import check_saved, names, new_saver, save, state
from tests.state.checkpoint.test_atomic import make_folder
from tests.state.checkpoint.test_remote import objects


def save_and_die(path: Path, moment: str) -> None:
    def die(*_: object) -> None:
        os.kill(os.getpid(), 9)

    setattr(target.FolderTarget if moment == "commit" else target, moment, die)
    save(new_saver(), path, state(2.0))


@pytest.mark.parametrize("moment", ["commit", "replace_folder", "sync_path", "DirectFile"])
def test_a_killed_save_leaves_the_old_checkpoint_and_the_next_one_cleans_up(
    tmp_path: Path, moment: str
) -> None:
    save(new_saver(), tmp_path / "a", state(1.0))
    with pytest.raises(RankFailed, match="SIGKILL"):
        launch(save_and_die, 1, tmp_path / "a", moment)
    assert len(names(tmp_path)) == 2
    check_saved(tmp_path / "a", state(1.0))
    save(new_saver(), tmp_path / "b", state(3.0))
    assert names(tmp_path) == ["a", "b"]


def make_left(folder: Path, name: str, *files: str, seconds: float = 0.0) -> Path:
    path = folder / name
    path.mkdir()
    for file in files:
        (path / file).touch()
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def test_only_what_nobody_writes_is_removed(tmp_path: Path) -> None:
    make_left(tmp_path, ".killed.0123abcd.part", ".writing")
    make_left(tmp_path, ".old.0123abcd.part", seconds=100)
    make_left(tmp_path, ".replaced.0123abcd.part", "manifest.json")
    make_left(tmp_path, ".new.0123abcd.part")
    make_left(tmp_path, ".download.part", "file", seconds=100)  # of another program
    (tmp_path / ".file.0123abcd.part").touch()
    written = make_left(tmp_path, ".written.0123abcd.part", ".writing", seconds=100)
    held = os.open(written / ".writing", os.O_WRONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        remove_leftovers(tmp_path)
    finally:
        os.close(held)
    assert names(tmp_path) == [
        ".download.part",
        ".file.0123abcd.part",
        ".new.0123abcd.part",
        ".written.0123abcd.part",
    ]


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_lock_that_is_no_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    """A pipe that nobody reads would be waited for; this one has a reader, so that the test ends."""
    lock = make_left(tmp_path, ".left.0123abcd.part") / ".writing"
    (tmp_path / "elsewhere").touch()
    os.mkfifo(lock) if kind == "pipe" else lock.symlink_to(tmp_path / "elsewhere")
    reader = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)
    try:
        remove_leftovers(tmp_path)
    finally:
        os.close(reader)
    assert names(tmp_path) == [".left.0123abcd.part", "elsewhere"]


def test_a_manifest_without_an_end_is_not_read_by_the_save_that_replaces_it(tmp_path: Path) -> None:
    save(new_saver(), tmp_path / "a", state(1.0))
    os.truncate(tmp_path / "a" / "manifest.json", 2**42)  # takes no room on the disk
    save(new_saver(), tmp_path / "a", state(2.0))
    check_saved(tmp_path / "a", state(2.0))


def test_a_link_in_the_place_of_a_manifest_is_no_checkpoint_to_replace(tmp_path: Path) -> None:
    save(new_saver(), tmp_path / "a", state(1.0))
    (tmp_path / "a" / "manifest.json").rename(tmp_path / "elsewhere")
    (tmp_path / "a" / "manifest.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="has files that are no checkpoint of echelon's"):
        save(new_saver(), tmp_path / "a", state(2.0))


def test_a_folder_with_the_name_of_a_leftover_stays(tmp_path: Path) -> None:
    (tmp_path / ".latest.0123abcd").mkdir()
    (tmp_path / ".latest.4567abcd").touch()
    remove_small_leftovers(tmp_path / "latest")
    assert names(tmp_path) == [".latest.0123abcd"]


@pytest.mark.parametrize(
    "text",
    ["", "[" * 10**5, "[]", "{}", '{"numbers": {}, "files": 3}', '{"numbers": {}, "files": {"a": [1]}}'],
)
def test_a_report_that_no_rank_has_written_is_an_error(tmp_path: Path, text: str) -> None:
    written = target.FolderTarget(tmp_path / "a", "0123abcd")
    written.begin()
    assert written.find_report(0) is None
    written.report(0, {"numbers": {}, "files": {"a": [1, "hash"]}})
    assert written.find_report(0) == {"numbers": {}, "files": {"a": [1, "hash"]}}
    (written.temporary / "report-1.json").write_text(text)
    (written.temporary / "report-2.json").symlink_to(written.temporary / "report-0.json")
    with pytest.raises(UserError, match=r"report-1.json: is not what a rank reports"):
        written.find_report(1)
    with pytest.raises(OSError, match="symbolic links"):  # which the save reports
        written.find_report(2)
    written.abandon()


def test_a_job_killed_between_two_renames_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    save(new_saver(), tmp_path / "a", state(1.0))
    rename, calls = Path.rename, []

    def interrupted(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(new_saver(), tmp_path / "a", state(2.0))
    monkeypatch.undo()
    assert locate(tmp_path / "a") != tmp_path / "a"
    check_saved(tmp_path / "a", state(1.0))
    save(new_saver(), tmp_path / "a", state(3.0))
    check_saved(tmp_path / "a", state(3.0))


def fail_once(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The first time that the names in `folder` go to the disk."""
    real, failed = target.sync_path, list[Path]()

    def sync(path: Path) -> None:
        if path == folder and not failed:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path)

    monkeypatch.setattr(target, "sync_path", sync)
    monkeypatch.setattr(storage_errors, "_pause", lambda _: None)


@pytest.mark.parametrize("exchanges", [True, False])
def test_an_error_after_the_rename_destroys_neither_checkpoint(
    tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    for value in (1.0, 2.0):
        fail_once(monkeypatch, tmp_path)
        save(new_saver(), tmp_path / "a", state(value))
        check_saved(tmp_path / "a", state(value))
    fail_once(monkeypatch, tmp_path)
    with pytest.raises(UserError, match=r"a: the checkpoint is saved, but .* failed: Input/output error"):
        save(new_saver(), tmp_path / "a", state(3.0), retries=0)
    check_saved(tmp_path / "a", state(3.0))
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_what_a_killed_job_has_left_of_a_replaced_checkpoint_goes_with_the_next_save(
    tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "_exchange", atomic._exchange if exchanges else lambda *_: False)
    save(new_saver(), tmp_path / "a", state(1.0))
    (tmp_path / "a").rename(atomic.standby_of(tmp_path / "a"))  # killed here, with nothing at its place
    save(new_saver(), tmp_path / "a", state(2.0))
    assert names(tmp_path) == ["a"]
    make_folder(atomic.standby_of(tmp_path / "a"), "of an older version")  # beside a whole one
    save(new_saver(), tmp_path / "a", state(3.0))
    assert names(tmp_path) == ["a"]
    check_saved(tmp_path / "a", state(3.0))


def test_a_save_that_is_given_up_goes_though_another_rank_begins_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = target.FolderTarget(tmp_path / "a", "token")
    written.begin()
    left = iter(range(3))

    def remove(path: Path, *, ignore_errors: bool) -> None:
        shutil.rmtree(path, ignore_errors=ignore_errors)
        if next(left, None) is not None:  # between the look into the folder and its removal
            path.mkdir()
            (path / "rank-00001.safetensors").touch()

    monkeypatch.setattr(target, "shutil", SimpleNamespace(rmtree=remove))
    written.abandon()
    assert names(tmp_path) == []


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://{tmp_path}/a"


def test_an_object_that_is_not_finished_is_dropped() -> None:
    class File:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def write(self, data: memoryview) -> None:
            self.calls.append(f"write {bytes(data)!r}")

        def close(self) -> None:
            self.calls.append("close")

        def discard(self) -> None:
            self.calls.append("discard")
            raise RuntimeError("of a package")

    for is_finished, expected in ((True, ["write b'ab'", "close"]), (False, ["write b'ab'", "discard"])):
        file = File()
        sink = RemoteFile(file)
        sink.write(memoryview(b"abc"), 2)
        if is_finished:
            sink.finish()
        sink.close()
        assert file.calls == expected
    RemoteFile(io.BytesIO()).close()  # of a storage that cannot


def test_what_is_under_a_url(url: str) -> None:
    memory = fsspec.filesystem("memory")
    assert remote_sizes(memory, url) == {}
    memory.pipe_file(f"{url}/y", b"123")
    memory.pipe_file(f"{url}/x", b"")
    assert remote_sizes(memory, url) == {"x": 0, "y": 3}
    assert sorted(remote_sizes(memory, url)) == ["x", "y"]
    listed = SimpleNamespace(ls=lambda *_, **__: [{"name": "x/run/"}, {"name": ""}, {"name": "x/run/c/"}])
    assert remote_sizes(listed, "x/run") == {"c": None}, (
        "a storage lists the folder itself too, without a size"
    )


@pytest.mark.parametrize("name", ["rank-1.txt", "other.safetensors", "report.json"])
def test_objects_that_no_save_has_written(url: str, name: str) -> None:
    fsspec.filesystem("memory").pipe_file(f"{url}/{name}", b"")
    with pytest.raises(UserError, match=f"no checkpoint of echelon's: {name}"):
        target_at(url, "0123abcd").begin()


@pytest.mark.parametrize(
    ("there", "is_kept"), [(b"mine", True), (b"another", False), (None, False), (OSError("503"), True)]
)
def test_a_save_is_removed_only_if_it_is_surely_not_there(
    url: str, there: bytes | Exception | None, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, target = fsspec.filesystem("memory"), target_at(url, "0123abcd")
    file = f"{url}/{target.stored_name('rank-00000.safetensors')}"
    assert file.endswith("/rank-00000-0123abcd.safetensors")
    memory.pipe_file(file, b"")
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "pipe_file", lambda *_: (_ for _ in ()).throw(OSError("timed out")))
        with pytest.raises(OSError, match="timed out"):
            target.commit(b"mine", {})
    if isinstance(there, bytes):
        memory.pipe_file(f"{url}/manifest.json", there)
    if isinstance(there, Exception):
        monkeypatch.setattr(type(memory), "cat_file", lambda *_: (_ for _ in ()).throw(there))
    target.abandon()
    assert memory.exists(file) is is_kept


def test_what_is_saved_is_not_removed_and_what_was_never_written_is(url: str) -> None:
    memory, target = fsspec.filesystem("memory"), target_at(url, "0123abcd")
    memory.pipe_file(f"{url}/rank-00000-0123abcd.safetensors", b"")
    memory.pipe_file(f"{url}/rank-00000-89abcdef.safetensors", b"")
    target.abandon()
    assert objects(url) == ["rank-00000-89abcdef.safetensors"]
    target.commit(b"mine", {"rank-00000-89abcdef.safetensors": FileRecord(0, "")})
    memory.pipe_file(f"{url}/rank-00001-0123abcd.safetensors", b"")
    target.abandon()
    assert len(objects(url)) == 3
    target.clean_up()
    assert objects(url) == ["manifest.json", "rank-00000-89abcdef.safetensors"]
