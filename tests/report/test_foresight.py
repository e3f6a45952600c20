"""Predictions of a run, from its folder alone."""

import json
from pathlib import Path
from typing import Any

from echelon.report.foresight import changes, foresee, job_line
from echelon.report.run_files import read_run
from echelon.train.jobs.job import DataJob, Job, ModelJob
from tests.report.folders import rank_row, write_run

SMALL = {"layers": 1, "width": 32, "heads": 2}


def foreseen(path: Path, device: str, **job: Any) -> dict[str, Any]:
    table = {"plan": "data=2", "steps": 4, "batch": 4, "sequence": 16, "model": SMALL, **job}
    folder = write_run(path, job=table, plan=table["plan"])
    (folder / "measured.json").write_text(
        json.dumps({"step": 2, "number": 2, "ranks": [rank_row(rank, device) for rank in range(2)]})
    )
    return foresee(read_run(folder))


def test_a_run_has_predicted_bytes_memory_seconds_and_plans(tmp_path: Path) -> None:
    found = foreseen(tmp_path, "NVIDIA H100 80GB HBM3", plan="data=2 precision=bf16")
    assert found["notes"] == []
    assert found["cluster"] == {"name": "h100", "count": 2}
    gradients = [row for row in found["bytes"] if row["subject"] == "gradients"]
    assert [(row["axis"], row["operation"]) for row in gradients] == [("data", "all_reduce")]
    assert found["prediction"]["step_seconds"] > 0
    assert found["prediction"]["memory"][0]["parameters"] > 0
    first = found["plans"][0]
    assert first["seconds"] == min(plan["seconds"] for plan in found["plans"])
    assert first["command"].startswith(f"echelon train --plan '{first['plan']}' --set steps=4")
    assert "--set model.width=32" in first["command"]


def test_what_cannot_be_predicted_is_said(tmp_path: Path) -> None:
    found = foreseen(tmp_path / "a", "Weird Chip 9")
    assert found["prediction"] is None if "prediction" in found else True
    assert any("the planner has no figures of a Weird Chip 9" in note for note in found["notes"])
    found = foreseen(tmp_path / "b", "cpu", plan="data=2 sync=async")
    assert any(note.startswith("no prediction of bytes: 1 error in dry run") for note in found["notes"])
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "run.json").write_text('{"job": {"layers": {}, "plan": 7}}')
    (note,) = foresee(read_run(tmp_path / "c"))["notes"]
    assert note.startswith("no prediction of the job: ")


def test_a_job_line_has_the_settings_that_differ_quoted() -> None:
    job = Job(
        steps=7, plan="data=4", trace="2:3", model=ModelJob(layers=3, tied=True), data=DataJob("a b; rm -rf")
    )
    assert changes(job) == [
        ("steps", 7),
        ("model.layers", 3),
        ("model.tied", True),
        ("data.source", "a b; rm -rf"),
    ]
    assert job_line(job, "data=2 zero=1") == (
        "echelon train --plan 'data=2 zero=1' --set steps=7 --set model.layers=3 --set model.tied=true "
        "--set 'data.source=a b; rm -rf'"
    )
