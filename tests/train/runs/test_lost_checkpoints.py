"""A run that had saved, and whose checkpoints are gone, does not begin again in silence."""

from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.state.checkpoint.copies.folder import MemoryFolder
from echelon.train.events import METRICS, Stepped, line_of
from echelon.train.runs.resume import resume
from tests.state.checkpoint.copies.host_files import write_copies
from tests.train.runs.test_resume import make_run


def make_trained(out: Path, state: str, steps: int, save_every: int, keep: int | str = 2) -> Path:
    run = make_run(out, state, save_every=save_every, keep=keep, steps=500)
    lines = [line_of(Stepped(step, 1.0, 1.0, 0.1, 10, 0.1, 0, 0.0, 0.0, 0)) for step in range(1, steps + 1)]
    (run / METRICS).write_text("\n".join(lines), encoding="utf-8")
    return run


@pytest.mark.parametrize(
    ("state", "steps", "save_every"), [("running", 21, 10), ("failed", 21, 10), ("preempted", 1, 0)]
)
def test_checkpoints_that_are_gone(state: str, steps: int, save_every: int, tmp_path: Path) -> None:
    run = make_trained(tmp_path, state, steps, save_every)
    with pytest.raises(UserError) as refusal:  # exit code 2
        resume(run, [], None)
    assert f"the run has made {steps} steps and has saved its state" in str(refusal.value)
    assert f"remove {run / METRICS} to train this one from step 1 again" in str(refusal.value)
    (run / METRICS).unlink()
    assert resume(run, [], None).path == run, "as the error says"


def test_a_finished_run_without_its_checkpoints(tmp_path: Path) -> None:
    run = make_trained(tmp_path, "finished", 500, 0)
    with pytest.raises(UserError, match=r"put the checkpoints back, or train a new run without --resume$"):
        resume(run, ["steps=600"], None)


@pytest.mark.parametrize(
    ("state", "steps", "save_every"), [("running", 20, 10), ("failed", 500, 0), ("preempted", 0, 10)]
)
def test_a_run_that_may_never_have_saved_begins_again(
    state: str, steps: int, save_every: int, tmp_path: Path
) -> None:
    # At step 20 the save of step 10 may be under way: the next save waits for it.
    run = make_trained(tmp_path, state, steps, save_every)
    assert resume(run, [], None).path == run


@pytest.mark.parametrize("settings", [[], ["keep=2"]])
def test_copies_in_memory_are_enough(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHELON_MEMORY_FOLDER", str(tmp_path))
    run = make_trained(tmp_path, "running", 21, 10, "memory")
    with pytest.raises(UserError, match="and no copy in memory"):
        resume(run, settings, None)
    write_copies(MemoryFolder(run), 20)
    assert resume(run, settings, None).path == run
