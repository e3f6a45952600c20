"""Checkpoints in remote storage: fsspec's in memory stands for all."""

import errno
import os
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest

from echelon.checkpoint import open_whole, storage_errors
from echelon.errors import UserError
from tests.checkpoint.saving import check_saved, new_saver, save, save_and_finish, state


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
        UserError, match="RuntimeError: 503 slow down; the checkpoints before it are as they w"
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


def test_urls_need_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="strange://a: fsspec cannot open this kind of URL"):
        save(new_saver(), "strange://a", state())
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UserError, match="s3://a: a URL needs fsspec, and the package of its kind of storage"):
        save(new_saver(), "s3://a", state())
