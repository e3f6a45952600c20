"""What an event says of experts."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from echelon.collectives import Move, Traffic
from echelon.launching import Ranks
from echelon.report.foresight import foresee
from echelon.report.run_files import read_run
from echelon.train import strict_json
from echelon.train.events import (
    MEASURED,
    MEASURED_STEP,
    METRICS,
    Evaluated,
    Event,
    GateLoad,
    Measured,
    RolledBack,
    Started,
    Stepped,
    moved_rows,
    read_metrics,
)
from echelon.train.jobs.job import Job, ModelJob, as_plain
from echelon.train.loop import train_rank
from echelon.train.run import Logbook
from echelon.train.runs.run_folder import RunFolder
from echelon.train.trackers import Trackers


def test_the_load_of_the_busiest_expert_is_a_multiple_of_the_fair_share() -> None:
    assert GateLoad("gate", (6.0, 1.0, 1.0), 0.0, 0.5).largest_share == 2.25
    assert GateLoad("gate", (2.0, 2.0), 0.0, 0.5).largest_share == 1.0
    assert GateLoad("gate", (0.0, 0.0), 0.0, 0.5).largest_share == 1.0, "a step without a token"


GATE = GateLoad("blocks.0.gate", (3.0, 1.0), 0.0, 0.5)


def stepped(step: int, loss: float = 1.0) -> Stepped:
    return Stepped(step, loss, 0.5, 1e-3, 1000, 0.1, 7, 0.2, 0.1, 100, experts=(GATE,))


def logbook_of(folder: RunFolder) -> Logbook:
    """One of several in this process, where trackers would write the same file."""
    return Logbook(folder, Trackers({}, folder, {}))


def test_a_run_that_goes_on_has_each_step_once(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "a", {})
    logbook = logbook_of(folder)
    logbook.take(Started(42, 9000, "stdlib", "cpu"))
    for event in (stepped(1), stepped(2), Evaluated(2, math.nan), stepped(3), stepped(4)):
        logbook.take(event)
    with (folder.path / METRICS).open("a", encoding="utf-8") as file:
        file.write('{"kind": "rollback", "step": 2}\n{"kind": "step", "st')  # the process was killed
    later = logbook_of(folder)
    later.take(Started(42, 9000, "stdlib", "cpu", after_step=2))
    later.take(stepped(3, 0.5))
    assert kinds_and_steps(folder.path / METRICS) == [
        ("step", 1),
        ("step", 2),
        ("evaluation", 2),
        ("rollback", 2),
        ("step", 3),
    ]
    summary = later.summary()
    assert (summary["steps"], summary["first_loss"], summary["loss"]) == (3, 1.0, 0.5)
    assert read_metrics(folder.path / METRICS)[0] == stepped(1)


def kinds_and_steps(path: Path) -> list[tuple[str, int]]:
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [(line["kind"], line["step"]) for line in lines]


@pytest.mark.parametrize("last", [2, 4])
def test_a_rollback_that_a_killed_process_did_not_write_is_written_in_its_place(
    last: int, tmp_path: Path
) -> None:
    # Rank 0 went back to step 2, and saved that; its parent was killed before it had read that message.
    folder = RunFolder.create(tmp_path, "a", {})
    logbook = logbook_of(folder)
    logbook.take(Started(42, 9000, "stdlib", "cpu"))
    for step in range(1, last + 1):
        logbook.take(stepped(step))
    rollbacks = (RolledBack(2, 5, "the loss jumped", 2, 5, 1, 3), RolledBack(2, 4, "again", 5, 7, 2, 3))
    for _ in range(2):  # the second time they are there
        later = logbook_of(folder)
        later.take(Started(42, 9000, "stdlib", "cpu", after_step=last, rollbacks=rollbacks))
        after = [("step", step) for step in range(3, last + 1)]
        expected = [("step", 1), ("step", 2), ("rollback", 2), ("rollback", 2), *after]
        assert kinds_and_steps(folder.path / METRICS) == expected
        assert (later.summary()["steps"], later.summary()["rollbacks"]) == (last, 2)


def test_a_run_that_starts_from_the_beginning_again_forgets_all(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "a", {})
    logbook = logbook_of(folder)
    for event in (Started(42, 9000, "stdlib", "cpu"), stepped(1), Started(42, 9000, "stdlib", "cpu")):
        logbook.take(event)
    assert (folder.path / METRICS).read_text(encoding="utf-8") == ""
    assert logbook.last_step == 0


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    lines = ("[]", "{", '{"kind": "step"}', '{"kind": "step", "step": "x"}', '{"kind": []}', "\x00")
    (tmp_path / METRICS).write_text("\n".join(lines), encoding="utf-8")
    assert read_metrics(tmp_path / METRICS) == []
    assert read_metrics(tmp_path / "missing") == []


Warm = Callable[[int], Ranks]


def test_moves_are_summed_by_axis_operation_and_subject() -> None:
    moves = [
        Move("data", "all_reduce", "gradients", Traffic(10, 5, 5), 0.0),
        Move("all", "all_reduce", "metrics", Traffic(8, 4, 4), 0.0),
        Move("data", "all_reduce", "gradients", Traffic(20, 10, 11), 0.0),
    ]
    assert [tuple(row.values()) for row in moved_rows(moves)] == [
        ("all", "all_reduce", "metrics", 1, 8, 4, 4),
        ("data", "all_reduce", "gradients", 2, 30, 15, 16),
    ]


def train(job: Job, folder: Path) -> list[Event]:
    events: list[Event] = []
    train_rank(job, folder, events.append)
    return [event for event in events if isinstance(event, Measured)]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2 zero=1", "pipeline=2 microbatches=2", "data=2 expert=2"])
def test_predicted_bytes_are_those_that_were_measured(plan: str, tmp_path: Path, warm_ranks: Warm) -> None:
    """But for those of experts, whose gates send what they like."""
    model = ModelJob(layers=2, width=32, heads=2)
    if "expert" in plan:
        model = ModelJob(preset="moe-tiny", layers=2, width=32, heads=2)
    job = Job(
        plan=plan, steps=MEASURED_STEP + 1, batch=4, sequence=16, audit="off", evaluate_every=0, model=model,
        out=str(tmp_path),
    )  # fmt: skip
    (measured,), others = warm_ranks(2).run(partial(train), job, tmp_path)
    assert others == []
    assert measured.step == measured.number == MEASURED_STEP
    assert [row["rank"] for row in measured.ranks] == [0, 1]
    (tmp_path / "run.json").write_text(strict_json.dump({"job": as_plain(job), "plan": plan}))
    (tmp_path / MEASURED).write_text(
        strict_json.dump({"number": measured.number, "ranks": list(measured.ranks)})
    )
    found = foresee(read_run(tmp_path))
    assert "bytes" in found, found["notes"]

    def by_key(rows: list[dict[str, Any]]) -> dict[tuple[str, ...], int]:
        return {
            (row["axis"], row["operation"], row["subject"]): row["sent"]
            for row in rows
            if row["subject"] != "experts"
        }

    assert by_key(found["bytes"]) == by_key(measured.ranks[0]["moved"])
    peak, stage = measured.ranks[0]["memory"]["peak"], found["prediction"]["memory"][0]
    for category in ("parameters", "gradients"):
        assert stage[category] == pytest.approx(peak[category], rel=0.1)
