"""Errors that pass, and errors that do not."""

import errno
import os
from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.state.checkpoint import storage_errors
from echelon.state.checkpoint.storage_errors import (
    RETRIES,
    as_folder,
    is_url,
    report_write_errors,
    with_retries,
)


def failing(times: int, code: int = errno.EIO) -> tuple[list[int], object]:
    calls: list[int] = []

    def work() -> str:
        calls.append(1)
        if len(calls) <= times:
            raise OSError(code, os.strerror(code))
        return "done"

    return calls, work


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(storage_errors.time, "sleep", found.append)
    return found


@pytest.mark.parametrize(("times", "waited"), [(0, []), (1, [0.5]), (3, [0.5, 1.0, 2.0])])
def test_what_may_pass_is_tried_again(pauses: list[float], times: int, waited: list[float]) -> None:
    calls, work = failing(times)
    assert with_retries(work, RETRIES) == "done"  # type: ignore[arg-type]
    assert (len(calls), pauses) == (times + 1, waited)


def test_not_more_often_than_it_is_told(pauses: list[float]) -> None:
    for retries in (0, 1, 3):
        calls, work = failing(9)
        with pytest.raises(OSError, match="Input/output error"):
            with_retries(work, retries)  # type: ignore[arg-type]
        assert len(calls) == retries + 1
    assert len(pauses) == 4


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.ENOTDIR, errno.EINVAL])
def test_what_does_not_pass_is_not_tried_again(pauses: list[float], code: int) -> None:
    calls, work = failing(1, code)
    with pytest.raises(OSError, match=os.strerror(code)):
        with_retries(work, 3)  # type: ignore[arg-type]
    assert (len(calls), pauses) == (1, [])


def test_nothing_is_tried_again_when_nobody_waits(pauses: list[float]) -> None:
    calls, work = failing(1)
    with pytest.raises(OSError, match="Input/output"):
        with_retries(work, 3, lambda: True)  # type: ignore[arg-type]
    assert (len(calls), pauses) == (1, [])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "full"), "full (free some space, keep fewer checkpoints, or save elsewhere)"),
        (OSError(errno.EIO, "broken"), "broken"),
        (OSError("of a package"), "of a package"),
        (OSError(), "OSError"),
    ],
)
def test_errors_name_the_place_the_reason_and_the_fix(error: OSError, words: str) -> None:
    with pytest.raises(UserError) as caught, report_write_errors("s3://a"):
        raise error
    assert caught.value.title == (
        f"s3://a: the checkpoint cannot be written: {words}; checkpoints before it, if any, are as they were"
    )
    with pytest.raises(UserError) as caught, report_write_errors("s3://a", is_whole=True):
        raise error
    assert caught.value.title.startswith("s3://a: the checkpoint is saved, but")
    assert caught.value.title.endswith(f"failed: {words}")


def test_urls_and_folders() -> None:
    assert [is_url(path) for path in ("s3://a/b", "file:///a", "/a/b", Path("s3://a"))] == [
        True,
        *[False] * 3,
    ]
    assert (as_folder("file:///a/b"), as_folder("a"), as_folder(Path("b"))) == (
        Path("/a/b"),
        Path("a"),
        Path("b"),
    )
