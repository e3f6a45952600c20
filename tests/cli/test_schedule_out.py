from pathlib import Path

import pytest

from echelon.cli.schedule import out_errors


@pytest.mark.parametrize("name", ["new.svg", "there.png", "a.txt"])
def test_a_file_that_can_be_written_is_not_made_by_asking(tmp_path: Path, name: str) -> None:
    (tmp_path / "there.png").write_bytes(b"old")
    assert out_errors(tmp_path / name) == []
    assert [path.name for path in tmp_path.iterdir()] == ["there.png"]


def test_places_that_cannot(tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "is a folder; give a file in it" in out_errors(tmp_path / "folder.svg")[0]
    assert "there is no folder" in out_errors(tmp_path / "no" / "x.svg")[0]
    assert "cannot be written" in out_errors(tmp_path / "file" / "x.svg")[0]
    assert len(out_errors(tmp_path / "no" / "x.pdf")) == 2
