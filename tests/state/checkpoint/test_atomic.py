"""Files and folders that are replaced and removed in one step."""

from pathlib import Path

import pytest

from echelon.state.checkpoint import atomic
from echelon.state.checkpoint.atomic import remove_folder, replace_folder, write_atomically
from tests.state.checkpoint.saving import names


def make_folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "text").write_text(text)
    return path


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_takes_the_place_of_another(
    tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    new, path = make_folder(tmp_path / "new", "new"), make_folder(tmp_path / "path", "old")
    replace_folder(new, path)
    assert (path / "text").read_text() == "new"
    assert (new / "text").read_text() == "old"
    assert names(tmp_path) == ["new", "path"]


def test_linux_exchanges_names_at_once(tmp_path: Path) -> None:
    first, second = make_folder(tmp_path / "a", "a"), make_folder(tmp_path / "b", "b")
    assert atomic._exchange(first, second)
    with pytest.raises(FileNotFoundError):
        atomic._exchange(first, tmp_path / "missing")


def test_a_removed_checkpoint_is_gone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "a", "a")
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # killed here
    remove_folder(tmp_path / "a")
    (left,) = names(tmp_path)
    assert left.startswith(".a.")
    assert left.endswith(".part")


def test_a_small_file_is_replaced_at_once(tmp_path: Path) -> None:
    for text in (b"old", b"new"):
        write_atomically(tmp_path / "latest", text)
        assert (tmp_path / "latest").read_bytes() == text
    assert names(tmp_path) == ["latest"]
