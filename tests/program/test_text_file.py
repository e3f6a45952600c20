"""Files of strangers that have no end are refused by whoever reads them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.planner import read_profile
from echelon.program import load_schedule, text_file
from echelon.train.jobs.job_file import read_job


@pytest.mark.parametrize("read", [read_profile, load_schedule, read_job])
def test_a_file_without_an_end_is_not_read(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "given.toml"
    path.touch()
    os.truncate(path, 2**42)  # takes no room on the disk
    with pytest.raises(UserError, match=r"cannot be read: it has more than 33554432 characters"):
        read(path)


def test_the_longest_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_file, "MOST_CHARACTERS", 3)
    (tmp_path / "a").write_text("äöü", encoding="utf-8")
    assert text_file.read_text_file(tmp_path / "a") == "äöü"
    (tmp_path / "a").write_text("äöüß", encoding="utf-8")
    with pytest.raises(OSError, match="more than 3 characters"):
        text_file.read_text_file(tmp_path / "a")
