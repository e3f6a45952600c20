"""Which checkpoint a path means, and which one instead of it."""

from pathlib import Path

import pytest

from echelon.errors import DamagedError, UserError
from echelon.state.checkpoint import SavedState
from echelon.state.checkpoint.finding import find_checkpoint, find_run, one_before_is_named
from tests.state.checkpoint.saving import names, new_saver, save, state


def make_run(path: Path, *steps: int) -> list[Path]:
    """A run with checkpoints of these steps; returns these."""
    checkpoints = [path / "checkpoints" / f"step-{step:08d}" for step in steps]
    for checkpoint in checkpoints:
        save(new_saver(), checkpoint, state())
    return checkpoints


def error_of(path: Path) -> str:
    """As the commands open a checkpoint."""
    checkpoint = find_checkpoint(path)
    with pytest.raises(DamagedError) as caught, one_before_is_named(checkpoint):
        SavedState.open(checkpoint).verify()
    return str(caught.value)


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (checkpoint,) = make_run(tmp_path, 3)
    for name in names(checkpoint):
        with pytest.raises(UserError, match=f"{name}: is a file; give the folder of a checkpoint or of a"):
            find_checkpoint(checkpoint / name)


@pytest.mark.parametrize("lost", ["manifest.json", "rank-00000.safetensors"])
def test_a_run_and_its_checkpoint_are_damaged_in_the_same_words(tmp_path: Path, lost: str) -> None:
    (checkpoint,) = make_run(tmp_path, 3)
    (checkpoint / lost).unlink()
    said = error_of(tmp_path)
    assert said.startswith(f"{checkpoint / lost}: ")
    assert said == error_of(checkpoint) == error_of(checkpoint.parent)
    assert "the one before" not in said, "there is none"


def test_the_one_before_a_damaged_one_is_named_if_it_is_there(tmp_path: Path) -> None:
    whole, lost, last = make_run(tmp_path, 1, 2, 3)
    (lost / "manifest.json").unlink()
    (file,) = last.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    for path in (tmp_path, last):
        title, fix = error_of(path).splitlines()
        assert title.startswith(f"{file}: is damaged")
        assert fix == f"  - give the one before it: {whole}"
    save(new_saver(), tmp_path / "alone", state())
    (tmp_path / "alone" / file.name).unlink()
    assert "the one before" not in error_of(tmp_path / "alone"), "its name has no step"


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}: holds no checkpoint; give a checkpoint"):
        find_checkpoint(tmp_path)
    with pytest.raises(UserError, match="nowhere: there is no such folder; give a checkpoint"):
        find_checkpoint(tmp_path / "nowhere")


def test_the_run_of_a_checkpoint(tmp_path: Path) -> None:
    (checkpoint,) = make_run(tmp_path / "run", 3)
    assert find_run(checkpoint) is None
    (tmp_path / "run" / "run.json").write_text("{}")
    for path in (checkpoint, checkpoint.parent, tmp_path / "run"):
        assert find_run(path) == tmp_path / "run"
    assert find_run(tmp_path) is None
    assert find_checkpoint(tmp_path / "run") == find_checkpoint(checkpoint.parent) == checkpoint
