"""Ten random kills, half of them during a save; `make chaos` has 200."""

from pathlib import Path

import pytest

from tests.chaos.kill import draw_kills
from tests.chaos.killer import rank_processes
from tests.chaos.training import (
    STEPS,
    differences,
    leftovers,
    short_job,
    train_disturbed,
    train_undisturbed,
)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2 zero=3", "pipeline=2 microbatches=2"])
def test_five_kills_leave_no_trace(plan: str, tmp_path: Path) -> None:
    reference = train_undisturbed(short_job(tmp_path / "undisturbed", plan))
    kills = draw_kills(f"test {plan}", 5, STEPS)
    run, done, problems = train_disturbed(short_job(tmp_path / "disturbed", plan), kills)
    assert problems == []
    assert len(done) == 5, f"of {', '.join(map(str, kills))}"
    assert differences(run, reference) == []


@pytest.mark.slow
def test_kills_with_copies_in_memory_leave_no_trace(tmp_path: Path) -> None:
    reference = train_undisturbed(short_job(tmp_path / "undisturbed", "data=2 zero=1"))
    job = short_job(tmp_path / "disturbed", "data=2 zero=1", keep="memory")
    run, done, problems = train_disturbed(job, draw_kills("memory", 4, STEPS))
    assert problems == []
    assert len(done) == 4
    assert differences(run, reference) == []


def test_a_run_that_was_killed_before_its_first_save_has_no_checkpoints(tmp_path: Path) -> None:
    assert leftovers(tmp_path, set(), {each.pid for each in rank_processes()}) == []
