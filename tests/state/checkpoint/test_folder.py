"""The checkpoints of a run: which are kept, which is the latest."""

import errno
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from echelon.errors import DamagedError, UserError
from echelon.state.checkpoint.folder import (
    CheckpointFolder,
    find_checkpoint,
    find_run,
    one_before_is_named,
    removed,
)
from echelon.state.checkpoint.saved import SavedState
from tests.state.checkpoint.saving import check_saved, names, new_saver, read, save, state


class Engine:
    """As far as a folder needs one: it saves its state, and reads it again."""

    def __init__(self) -> None:
        self.saver, self.value = new_saver(), 0.0

    def save(
        self,
        path: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,  # noqa: ARG002 (that of `saving.ABOUT` is saved)
        wait: bool = True,
        then: Callable[[], None] | None = None,
        copy_behind: bool = False,  # noqa: ARG002 (there are no steps)
        retries: int = 0,
    ) -> None:
        save(self.saver, path, state(self.value), wait=wait, then=then, retries=retries)

    def load_saved(self, saved: SavedState) -> dict[str, Any]:
        self.value = float(read(saved, "scalar"))
        return saved.manifest.extra


def train(engine: Engine, folder: CheckpointFolder, *steps: int) -> None:
    for step in steps:
        engine.value = float(step)
        folder.save(engine, step, {})
    engine.saver.finish()


@pytest.fixture(params=["folder", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """A folder, and URLs."""
    if request.param == "memory":
        return f"memory://{tmp_path}/run"
    return tmp_path / "run" if request.param == "folder" else f"file://{tmp_path}/run"


def test_the_last_are_kept_and_every_nth(place: str | Path) -> None:
    engine, folder = Engine(), CheckpointFolder(place, keep=2, keep_every=20)
    train(engine, folder, 10, 20, 30, 40, 50, 60, 70)
    assert folder.steps() == [70, 60, 40, 20]
    assert latest(place) == "step-00000070"
    for step in folder.steps():
        check_saved(folder.path_of(step), state(float(step)))


def latest(place: str | Path) -> str:
    if str(place).startswith("memory://"):
        import fsspec

        return str(fsspec.filesystem("memory").cat_file(f"{place}/latest").decode())
    return (Path(str(place).removeprefix("file://")) / "latest").read_text()


def test_the_last_whole_one_is_loaded(place: str | Path) -> None:
    engine, folder = Engine(), CheckpointFolder(place, keep=3)
    assert folder.load_last(engine) is None
    train(engine, folder, 1, 2, 3)
    damage(folder.path_of(3))
    engine.value, said = 0.0, []
    assert folder.load_last(engine, said.append) == {"at": 3}
    assert engine.value == 2.0
    (line,) = said
    assert "rank-00000" in line
    assert "trying the one before" in line
    train(engine, folder, 3)  # as training goes on
    check_saved(folder.path_of(3), state(3.0))


def test_if_all_are_damaged_nothing_is_trained_again_in_silence(place: str | Path) -> None:
    engine, folder = Engine(), CheckpointFolder(place)
    train(engine, folder, 1, 2)
    for step in (1, 2):
        damage(folder.path_of(step))
    said = list[str]()
    with pytest.raises(UserError, match="no checkpoint is whole; to train from the start") as caught:
        folder.load_last(engine, said.append)
    assert len(caught.value.errors) == 2
    assert folder.load_last(engine, said.append, after=0) is None, "there is a state of step 0 elsewhere"
    assert [line.rpartition("; ")[2] for line in said] == [
        *("trying the one before", "there is none before it"),
        *("trying the one before", "there is none between it and step 0"),
    ]
    assert folder.steps() == [2, 1]


def test_one_of_another_version_is_not_passed_over(tmp_path: Path) -> None:
    engine, folder = Engine(), CheckpointFolder(tmp_path)
    train(engine, folder, 1, 2)
    manifest = tmp_path / "step-00000002" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"version": 2', b'"version": 3'))
    with pytest.raises(UserError, match="is of version 3") as caught:
        folder.load_last(engine)
    assert "it may be whole; if it is not, remove" in str(caught.value)


def test_one_that_cannot_be_read_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> str:
        raise OSError(errno.EIO, "Input/output error")

    engine, folder = Engine(), CheckpointFolder(tmp_path)
    train(engine, folder, 1, 2)
    monkeypatch.setattr("echelon.state.checkpoint.file_checks.hash_file", fail)
    with pytest.raises(UserError, match=r"step-00000002.*cannot be read: Input/output error"):
        folder.load_last(engine)


def test_a_missing_file_is_damage_and_the_checkpoint_goes_with_the_next_save(tmp_path: Path) -> None:
    engine, folder = Engine(), CheckpointFolder(tmp_path)
    train(engine, folder, 10, 20)
    (tmp_path / "step-00000020" / "manifest.json").unlink()
    assert folder.load_last(engine, lambda _: None) == {"at": 3}
    assert engine.value == 10.0
    train(engine, folder, 15)
    assert folder.steps() == [15, 10]


def test_a_later_checkpoint_stays(tmp_path: Path) -> None:
    engine, folder = Engine(), CheckpointFolder(tmp_path)
    train(engine, folder, 10, 20, 5)
    assert folder.steps() == [20, 10, 5]
    assert folder.load_last(engine, before=20) == {"at": 3}
    assert engine.value == 10.0


def damage(path: str | Path) -> None:
    if isinstance(path, str):
        import fsspec

        memory = fsspec.filesystem("memory")
        (name,) = [name for name in memory.ls(path, detail=False) if name.endswith(".safetensors")]
        memory.pipe_file(name, memory.cat_file(name)[:-1] + b"\xff")
    else:
        (file,) = path.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")


def test_which_checkpoints_go() -> None:
    assert removed([50, 40, 30, 20, 10], 50, keep=2, keep_every=20) == [30, 10]
    assert removed([50, 40, 30], 50, keep=1, keep_every=0) == [40, 30]
    assert removed([50, 40, 30], 40, keep=1, keep_every=50) == [30]  # nobody has asked to go back before 50
    assert removed([50, 40, 30], 40, keep=2, keep_every=0, damaged={50}) == [50]
    assert removed([50, 40, 30, 20], 50, keep=2, keep_every=0, damaged={40}) == [40, 20]
    assert removed([10], 10, keep=2, keep_every=0) == []


def test_something_must_be_kept(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="keep=0 keep_every=0: keep must be at least 1"):
        CheckpointFolder(tmp_path, keep=0)


def test_other_files_are_no_checkpoints(tmp_path: Path) -> None:
    for name in ("step-1", "step-x", "latest", ".step-00000001.0123abcd.part"):
        (tmp_path / name).mkdir()
    assert CheckpointFolder(tmp_path).steps() == []


def test_what_is_kept_unless_it_is_told(tmp_path: Path) -> None:
    engine, folder = Engine(), CheckpointFolder(tmp_path)
    train(engine, folder, 1, 2, 3)
    assert folder.steps() == [3, 2]
    train(engine, CheckpointFolder(tmp_path, keep=1), 4)
    assert folder.steps() == [4]
    with pytest.raises(UserError, match="keep=2 keep_every=-1"):
        CheckpointFolder(tmp_path, keep_every=-1)


def test_a_step_is_looked_for_after_another(tmp_path: Path) -> None:
    engine, folder = Engine(), CheckpointFolder(tmp_path, keep=3)
    train(engine, folder, 0, 5)
    assert folder.load_last(engine, after=5) is None
    assert folder.load_last(engine, after=4) == {"at": 3}
    assert folder.load_last(engine, before=5) == {"at": 3}
    assert engine.value == 0.0, "also that of step 0"


@pytest.mark.parametrize("after", [-1, 1])
def test_a_damaged_one_goes_with_the_next_save_and_later_ones_do_not(tmp_path: Path, after: int) -> None:
    engine, folder = Engine(), CheckpointFolder(tmp_path, keep=3)
    train(engine, folder, 1, 9)
    damage(folder.path_of(9))
    folder.load_last(engine, lambda _: None, after=after)
    train(engine, folder, 2)
    assert folder.steps() == [2, 1]
    train(engine, folder, 9)
    train(engine, folder, 3)
    assert folder.steps() == [9, 3, 2, 1], "it is whole now"


def test_checkpoints_from_a_step_on_are_discarded(place: str | Path) -> None:
    engine, folder = Engine(), CheckpointFolder(place, keep=9)
    train(engine, folder, 10, 20, 30, 40)
    folder.discard_from(30)
    assert (folder.steps(), latest(place)) == ([20, 10], "step-00000020")
    folder.discard_from(10)
    assert folder.steps() == []
    folder.discard_from(0)  # of which there is none


def test_damaged_ones_before_a_discarded_step_still_go(tmp_path: Path) -> None:
    engine, folder = Engine(), CheckpointFolder(tmp_path, keep=9)
    train(engine, folder, 1, 2, 3)
    for step in (2, 3):
        damage(folder.path_of(step))
    folder.load_last(engine, lambda _: None)
    folder.discard_from(3)
    train(Engine(), CheckpointFolder(tmp_path, keep=9), 3)  # of another job
    train(engine, folder, 1)
    assert folder.steps() == [3, 1]


def test_what_a_killed_job_has_left_is_removed(tmp_path: Path) -> None:
    engine, folder = Engine(), CheckpointFolder(tmp_path)
    train(engine, folder, 1)
    (tmp_path / ".latest.0123abcd.part").write_text("")
    before = set(tmp_path.iterdir())
    folder.remove_leftovers()
    assert {path.name for path in before - set(tmp_path.iterdir())} == {".latest.0123abcd.part"}


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
