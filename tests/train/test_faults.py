"""A rank is lost, or the machine is taken away: the run goes on, and ends as if nothing had happened."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from echelon.launching import RankFailed
from echelon.train import loop
from echelon.train.events import Event, Noted, Restarting, Started, Stepped
from echelon.train.jobs.job import Job, OptimizerJob
from echelon.train.runs import Preempted, supervisor
from echelon.train.trainer import train
from tests.train.test_trainer import small_job


def pid_of_rank(rank: int) -> int:
    """Of the training; other tests may have ranks that are older."""
    named = [each for each in multiprocessing.active_children() if each.name == f"echelon rank {rank}"]
    newest = max(named, key=lambda each: each._identity)  # type: ignore[attr-defined]  # how many came before
    assert newest.pid is not None
    return newest.pid


def kill_rank(rank: int) -> None:
    os.kill(pid_of_rank(rank), signal.SIGKILL)


def at_step(step: int, action: Callable[[], None], events: list[Event]) -> Callable[[Event], None]:
    """Keep the events, and act once, at a step."""
    done: list[int] = []

    def show(event: Event) -> None:
        events.append(event)
        if isinstance(event, Stepped) and event.step == step and not done:
            done.append(step)
            action()

    return show


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def step_lines(run: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "step"]


def about(run: Path) -> dict[str, object]:
    read: dict[str, object] = json.loads((run / "run.json").read_text(encoding="utf-8"))
    return read


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    job = small_job(tmp_path, steps=7, save_every=2, evaluate_every=0)
    undisturbed = Path(train(job, lambda _: None)["run"])
    events: list[Event] = []
    run = Path(train(job, at_step(5, lambda: kill_rank(1), events))["run"])
    assert [event.reason.split(" (")[0] for event in events if isinstance(event, Restarting)] == [
        "rank 1 was killed by SIGKILL before it finished"
    ]
    first, second = (event.after_step for event in events if isinstance(event, Started))
    assert (first, second) in ((0, 2), (0, 4)), "the save of step 4 may be under way"
    assert weights(run) == weights(undisturbed)
    assert step_lines(run) == step_lines(undisturbed)
    assert about(run)["state"] == "finished"
    assert [each["kind"] for each in about(run)["events"]] == ["restart"]  # type: ignore[attr-defined]


def stop_rank(rank: int) -> None:
    os.kill(pid_of_rank(rank), signal.SIGSTOP)


def fall_asleep_once(job: Job, folder: Path) -> int | None:
    """Rank 1 does not come to the collectives of step 5, the first time."""
    step, flag = loop._Training.step, folder / "has slept"

    def sleep_before(training: "loop._Training", number: int) -> None:
        if number == 5 and os.environ["RANK"] == "1" and not flag.exists():
            flag.touch()
            time.sleep(3600)
        step(training, number)

    with mock.patch.object(loop._Training, "step", sleep_before):
        return supervisor.rank_main(job, folder)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["asleep", pytest.param("stopped", marks=pytest.mark.slow)])
def test_ranks_that_hang_are_started_again(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job(tmp_path, steps=7, save_every=2, evaluate_every=0)
    undisturbed = Path(train(job, lambda _: None)["run"])
    monkeypatch.setenv("ECHELON_DEADLINE", "4")
    events: list[Event] = []
    show = at_step(5, lambda: stop_rank(1), events)
    if how == "asleep":
        monkeypatch.setattr(supervisor, "rank_main", fall_asleep_once)
        show = events.append
    run = Path(train(job, show)["run"])
    reasons = [event.reason for event in events if isinstance(event, Restarting)]
    assert any(text.startswith("rank 1 seems to block the others") for text in reasons), reasons
    assert all(text.endswith("no rank gave a sign of life for 4 s") for text in reasons), reasons
    assert weights(run) == weights(undisturbed)
    assert step_lines(run) == step_lines(undisturbed)
    assert about(run)["state"] == "finished"


@pytest.mark.slow
def test_a_rank_that_is_lost_again_and_again_ends_the_run(tmp_path: Path) -> None:
    events: list[Event] = []

    def show(event: Event) -> None:
        events.append(event)
        if isinstance(event, Stepped) and event.step == 1:
            kill_rank(0)

    with pytest.raises(RankFailed, match="rank 0 was killed by SIGKILL") as caught:
        train(small_job(tmp_path, save_every=0, restarts=1), show)
    assert "1 restart since the last checkpoint did not help" in caught.value.__notes__[0]
    assert [event.text for event in events if isinstance(event, Noted)] == [
        "no checkpoint was whole yet: training begins again at step 1"
    ]
    (run,) = tmp_path.iterdir()
    assert about(run)["state"] == "failed"


def test_sigterm_saves_and_a_resumed_run_ends_as_if_it_had_never_come(tmp_path: Path) -> None:
    def job(folder: str, steps: int) -> Job:
        rate = OptimizerJob(schedule="constant", warmup=2)  # does not depend on the number of steps
        return small_job(tmp_path / folder, steps=steps, save_every=0, evaluate_every=0, optimizer=rate)

    with pytest.raises(Preempted) as caught:
        train(job("a", 5000), at_step(2, lambda: os.kill(os.getpid(), signal.SIGTERM), []))
    (run,) = (tmp_path / "a").iterdir()
    assert about(run)["state"] == "preempted"
    last = caught.value.step
    assert 2 <= last < 5000
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == [f"step-{last:08d}"]
    assert f"step {last} was the last, and is saved" in caught.value.__notes__[0]
    events: list[Event] = []
    train(job("a", last + 3), events.append, resume=run)
    assert [event.after_step for event in events if isinstance(event, Started)] == [last]
    undisturbed = Path(train(job("b", last + 3), lambda _: None)["run"])
    assert weights(run) == weights(undisturbed)
    assert step_lines(run) == step_lines(undisturbed)
