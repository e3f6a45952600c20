"""Checkpoints in remote storage: fsspec's in memory stands for all."""

import errno
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch

from echelon.errors import DamagedError, UserError
from echelon.state.checkpoint import storage_errors
from echelon.state.checkpoint.folder import CheckpointFolder
from echelon.state.checkpoint.saved import SavedState, open_whole
from echelon.state.checkpoint.target import target_at
from tests.state.checkpoint.saving import check_saved, new_saver, read, save, save_and_finish, state


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://{tmp_path}/a"


def objects(url: str) -> list[str]:
    return sorted(name.rpartition("/")[2] for name in fsspec.filesystem("memory").ls(url, detail=False))


@pytest.mark.parametrize("wait", [True, False])
def test_an_object_store_has_whole_checkpoints(url: str, wait: bool) -> None:
    saver = new_saver()
    for value in (1.0, 2.0):
        save(saver, url, state(value), wait=wait)
        saver.finish()
        check_saved(url, state(value))
        (first, second) = objects(url)
        assert first == "manifest.json"
        assert second.startswith("rank-00000-")


def test_without_its_manifest_there_is_no_checkpoint(url: str) -> None:
    with pytest.raises(UserError, match=r"has no manifest.json: there is no checkpoint, or not a whole one"):
        open_whole(url)
    save(new_saver(), url, state())
    fsspec.filesystem("memory").rm_file(f"{url}/manifest.json")
    with pytest.raises(UserError, match=r"has no manifest.json"):
        open_whole(url)
    save(new_saver(), url, state(2.0))  # what the killed job has left goes
    check_saved(url, state(2.0))
    assert len(objects(url)) == 2


def test_each_rank_of_each_save_has_a_report_of_its_own(url: str) -> None:
    one, other = (target_at(url, token) for token in ("0123abcd", "89abcdef"))
    reports: list[Any] = [{"numbers": {"steps": float(rank)}, "files": {}} for rank in range(3)]
    for rank in (0, 1):
        one.report(rank, reports[rank])
    other.report(0, reports[2])
    assert [one.find_report(rank) for rank in range(3)] == [reports[0], reports[1], None]
    assert [other.find_report(rank) for rank in range(2)] == [reports[2], None]


def test_other_objects_are_not_replaced(url: str) -> None:
    fsspec.filesystem("memory").pipe_file(f"{url}/thesis.md", b"the only copy")
    with pytest.raises(UserError, match=r"no checkpoint of echelon's: thesis.md"):
        save(new_saver(), url, state())
    assert objects(url) == ["thesis.md"]


@pytest.mark.parametrize("wait", [True, False])
def test_errors_of_the_network_are_tried_again_or_told(
    url: str, wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fsspec.filesystem("memory")
    real, left = type(memory).open, [2]

    def flaky(self: Any, path: str, *args: Any, **options: Any) -> Any:
        if "rank-00000" in path:
            left[0] -= 1
            if left[0] >= 0:
                raise RuntimeError("503 slow down")  # packages have errors of their own
        return real(self, path, *args, **options)

    monkeypatch.setattr(type(memory), "open", flaky)
    monkeypatch.setattr(storage_errors, "_pause", lambda _: None)
    saver = new_saver()
    save(saver, url, state(1.0), wait=wait, retries=2)
    saver.finish()
    check_saved(url, state(1.0))
    left[0] = 2
    with pytest.raises(
        UserError, match="RuntimeError: 503 slow down; checkpoints before it, if any, are as t"
    ):
        save_and_finish(saver, url, state(2.0), wait=wait, retries=1)
    check_saved(url, state(1.0))
    assert len(objects(url)) == 2


def raise_access() -> None:
    raise OSError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("late", ["then", "rm_file"])
def test_an_error_after_the_manifest_leaves_the_checkpoint(
    url: str, wait: bool, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = new_saver()
    save(saver, url, state(1.0))
    if late == "rm_file":
        monkeypatch.setattr(type(fsspec.filesystem("memory")), late, lambda *_: raise_access())
    with pytest.raises(UserError, match=r"a: the checkpoint is saved, but .* failed: Permission denied"):
        save_and_finish(saver, url, state(2.0), wait=wait, then=raise_access if late == "then" else None)
    check_saved(url, state(2.0))


@pytest.mark.parametrize("is_written", [True, False])
def test_a_manifest_that_was_written_behind_an_error_makes_a_checkpoint(
    url: str, is_written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(new_saver(), url, state(1.0))
    kind = type(fsspec.filesystem("memory"))
    pipe = kind.pipe_file

    def fail(self: Any, path: str, data: bytes, *args: Any, **options: Any) -> None:
        if is_written:
            pipe(self, path, data, *args, **options)
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    monkeypatch.setattr(kind, "pipe_file", fail)
    with pytest.raises(UserError, match="Connection timed out"):
        save(new_saver(), url, state(2.0), retries=0)
    check_saved(url, state(2.0 if is_written else 1.0))


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of objects that are opened to be read, one for each time."""
    kind, names = type(fsspec.filesystem("memory")), list[str]()
    real = kind.open

    def note(self: Any, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        if "r" in mode:
            names.append(path.rpartition("/")[2])
        return real(self, path, mode, *args, **options)

    monkeypatch.setattr(kind, "open", note)
    return names


def data_object(url: str) -> str:
    (name,) = (name for name in objects(url) if name.startswith("rank-"))
    return name


@pytest.mark.parametrize("added", [b"a byte or more too many", None])
def test_a_file_of_another_size_is_not_fetched(url: str, added: bytes | None, fetched: list[str]) -> None:
    save(new_saver(), url, state())
    memory, name = fsspec.filesystem("memory"), data_object(url)
    data = memory.cat_file(f"{url}/{name}")
    fetched.clear()
    memory.pipe_file(f"{url}/{name}", data[:-1] if added is None else data + added)
    found = len(data) + (-1 if added is None else len(added))
    with pytest.raises(DamagedError, match=rf"{name}: is damaged: it has {found} bytes, .* says {len(data)}"):
        open_whole(url)
    memory.rm_file(f"{url}/{name}")
    with pytest.raises(DamagedError, match=rf"{name}: is not there, and the manifest lists it"):
        open_whole(url)
    assert set(fetched) == {"manifest.json"}


def test_a_manifest_that_is_too_large_is_not_fetched(
    url: str, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.state.checkpoint.saved.MOST_BYTES", 1000)
    fsspec.filesystem("memory").pipe_file(f"{url}/manifest.json", bytes(1001))
    with pytest.raises(DamagedError, match=r"manifest.json: is damaged: it has more bytes than 1000"):
        open_whole(url)
    assert not fetched


def test_a_file_without_room_for_it_is_not_fetched(
    url: str, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(new_saver(), url, state())
    fetched.clear()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(
        UserError, match=r"manifest.json: has \d+ bytes, and the disk of .* has 1 free; .*TMPDIR"
    ):
        open_whole(url)
    assert not fetched


@pytest.mark.parametrize("has_sizes", [True, False])
def test_a_storage_that_lies_about_a_size_does_not_fill_the_disk(
    url: str, has_sizes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the size of the manifest, or none, and sends without an end."""
    save(new_saver(), url, state())
    sent, name = [0], data_object(url)
    kind = type(fsspec.filesystem("memory"))
    true_open, true_ls = kind.open, kind.ls

    class Endless(io.BytesIO):
        def read(self, count: int | None = -1) -> bytes:
            assert count is not None
            assert 0 <= count <= 1 << 24, "a block is read, never all"
            sent[0] += count
            return bytes(count)

    def lie(self: Any, path: str, *args: Any, **options: Any) -> Any:
        return Endless() if path.endswith(name) else true_open(self, path, *args, **options)

    def list_sizes(self: Any, path: str, *args: Any, **options: Any) -> Any:
        entries = true_ls(self, path, *args, **options)
        return entries if has_sizes else [{**each, "size": None} for each in entries]

    saved_bytes = kind.info(fsspec.filesystem("memory"), f"{url}/{name}")["size"]
    monkeypatch.setattr(kind, "open", lie)
    monkeypatch.setattr(kind, "ls", list_sizes)
    with pytest.raises(DamagedError, match=rf"{name}: is damaged: it has more bytes than {saved_bytes},"):
        open_whole(url)
    assert sent[0] == saved_bytes + 1


def test_the_last_checkpoint_is_fetched_once(url: str, fetched: list[str]) -> None:
    class Engine:
        def save(self, path: str | Path, **_: Any) -> None:
            raise AssertionError(path)

        def load_saved(self, saved: SavedState) -> dict[str, Any]:
            assert torch.equal(read(saved, "wide"), state()["wide"])
            return saved.manifest.extra

    save(new_saver(), f"{url}/step-00000003", state())
    fetched.clear()
    assert CheckpointFolder(url).load_last(Engine()) == {"at": 3}
    assert sorted(fetched) == ["manifest.json", data_object(f"{url}/step-00000003")]


def test_urls_need_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="strange://a: fsspec cannot open this kind of URL"):
        save(new_saver(), "strange://a", state())
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UserError, match="s3://a: a URL needs fsspec, and the package of its kind of storage"):
        save(new_saver(), "s3://a", state())
