"""What ranks hold and move in a step, beside what a dry run of the same plan predicts."""

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
from echelon.train.events import Event, Measured
from echelon.train.jobs.job import Job, ModelJob, as_plain
from echelon.train.loop import train_rank
from echelon.train.measured import MEASURED, MEASURED_STEP, moved_rows

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
