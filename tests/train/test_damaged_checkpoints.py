"""`echelon train --resume` with damaged checkpoints: they are named, and the one before is loaded."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.train.jobs.job import OptimizerJob
from echelon.train.trainer import train
from tests.cli.commands import output
from tests.train.test_faults import about, step_lines, weights
from tests.train.test_trainer import small_job


def flip_a_byte(checkpoint: Path) -> str:
    path = checkpoint / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    return path.name


def lose_a_file(checkpoint: Path) -> str:
    (checkpoint / "rank-00000.safetensors").unlink()
    return "rank-00000.safetensors"


def cut_the_manifest(checkpoint: Path) -> str:
    path = checkpoint / "manifest.json"
    path.write_bytes(path.read_bytes()[:-100])
    return path.name


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of 4 steps with checkpoints of steps 2 and 4, and one of 6 steps to compare with."""
    runs, rate = [], OptimizerJob(schedule="constant", warmup=2)  # does not depend on the number of steps
    for steps in (4, 6):
        out = tmp_path_factory.mktemp("runs")
        job = small_job(out, steps=steps, save_every=2, keep=3, evaluate_every=0, optimizer=rate)
        runs.append(Path(train(job, lambda _: None)["run"]))
    return runs[0], runs[1]


def copied(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "run"))


@pytest.mark.parametrize(
    "damage",
    [flip_a_byte, *(pytest.param(each, marks=pytest.mark.slow) for each in (lose_a_file, cut_the_manifest))],
)
def test_the_one_before_is_loaded_and_the_run_ends_as_if_nothing_had_happened(
    damage: Callable[[Path], str],
    trained: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = copied(trained[0], tmp_path)
    file = run / "checkpoints" / "step-00000004" / damage(run / "checkpoints" / "step-00000004")
    code, _, _ = output(capsys, "train", "--resume", str(run), "--set", "steps=6")
    assert code == 0
    (note,) = [each["text"] for each in about(run)["events"] if each["kind"] == "note"]  # type: ignore[attr-defined]
    assert note.startswith(f"{file}: ")
    assert note.endswith("trying the one before")
    assert weights(run) == weights(trained[1])
    assert step_lines(run) == step_lines(trained[1])
    assert not file.parent.exists() or (file.parent / "manifest.json").exists(), "no half of it is left"


def test_if_all_are_damaged_nothing_is_trained_and_nothing_is_removed(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(trained[0], tmp_path)
    names = {
        step: damage(run / "checkpoints" / f"step-{step:08d}")
        for step, damage in ((2, lose_a_file), (4, flip_a_byte))
    }
    before = files_of(run)
    code, _, err = output(capsys, "train", "--resume", str(run), "--set", "steps=6")
    assert code == 2
    assert "no checkpoint is whole; to train from the start, remove them" in " ".join(err.split())
    for step, name in names.items():
        assert str(run / "checkpoints" / f"step-{step:08d}" / name) in err.replace("\n", "")
    assert files_of(run) == before


def files_of(run: Path) -> dict[str, bytes]:
    """Of checkpoints, metrics and the model."""
    paths = [*run.glob("checkpoints/**/*"), *run.glob("model/*"), run / "metrics.jsonl"]
    return {str(path): path.read_bytes() for path in paths if path.is_file()}
