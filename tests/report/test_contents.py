"""What a page shows of a run, as data."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echelon.report.contents import MOST_POINTS, contents, differences, thin
from echelon.report.run_files import read_run
from tests.report.folders import write_run


def prediction(step: float = 4.0, **memory: float) -> dict[str, Any]:
    names = ("compute", "recompute", "host", "tensor", "context", "expert", "pipeline", "data", "bubble")
    seconds = dict.fromkeys((*names, "optimizer", "offload", "stragglers", "hidden"), 0.0)
    table = {
        "parameters": 400,
        "gradients": 400,
        "optimizer": 800,
        "activations": 900,
        "buffers": 0,
        **memory,
    }
    row = {"stage": 0, **table, "temporary": 50, "host": 0, "peak": 2550}
    return {
        "step_seconds": step,
        "mfu": 0.5,
        "peak_bytes": 2550,
        "seconds": seconds | {"compute": 3.0, "host": 0.5, "data": 0.5},
        "memory": [row],
    }


def test_figures_are_of_the_steps_and_of_the_last_validation(tmp_path: Path) -> None:
    run = contents(read_run(write_run(tmp_path)), {"prediction": prediction()})
    figures = run["figures"]
    assert (figures["steps"], figures["of_steps"], figures["skipped"], figures["restarts"]) == (20, 20, 1, 1)
    assert (figures["seconds"], figures["rate"], figures["memory"]) == (0.5, 4096 / 0.5, 1_000_020)
    assert figures["validation_loss"] == 2.0
    assert figures["hidden"] == pytest.approx(0.6)
    assert figures["mfu"] == pytest.approx(0.5 * 4.0 / 0.5), "the predicted operations in the measured time"


def test_marks_have_checkpoints_restarts_and_skipped_steps_at_their_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "rollback", "step": 10, "from_step": 12, "reason": "the loss has jumped"}\n')
    marks = contents(read_run(folder), {})["marks"]
    found = {(mark["kind"], mark["step"]) for mark in marks}
    assert found == {
        ("checkpoint", 5), ("checkpoint", 10), ("checkpoint", 15), ("checkpoint", 20),
        ("restart", 7), ("skipped", 9), ("rollback", 10),
    }  # fmt: skip
    (text,) = [mark["text"] for mark in marks if mark["kind"] == "rollback"]
    assert text == "from step 12 back to 10: the loss has jumped"


def test_parts_and_memory_and_bytes_stand_beside_their_predictions(tmp_path: Path) -> None:
    gradients = {"axis": "data", "operation": "all_reduce", "subject": "gradients", "sent": 400}
    metrics = {"axis": "all", "operation": "all_reduce", "subject": "metrics", "sent": 8}
    run = contents(read_run(write_run(tmp_path)), {"prediction": prediction(), "bytes": [gradients, metrics]})
    rows = {row["part"]: (row["predicted"], row["measured"]) for row in run["parts"]["rows"]}
    assert run["parts"]["source"] == "trace"
    assert rows["compute"] == (3.5, pytest.approx(3.25))
    assert rows["data"] == (0.5, pytest.approx(0.75))
    assert rows["optimizer"] == (0.0, pytest.approx(0.5))
    assert [(row["subject"], row["predicted"], row["measured"]) for row in run["bytes"]] == [
        ("metrics", 8.0, None),
        ("gradients", 400.0, 400.0),
    ]
    first, second = run["memory"]["ranks"]
    assert (first["peak"]["activations"], second["total"]) == (1000.0, 3600.0)
    assert run["memory"]["predicted"][0]["activations"] == 900
    assert run["machine"] == [{"host": "node0", "devices": ["2 × cpu"], "cores": 8}]
    assert run["stages"] == [
        {"stage": 0, "lines": ["stage 0: dense 1,000 parameters over data"], "ranks": [0, 1]}
    ]


def test_without_a_trace_the_metrics_tell_what_communication_cost(tmp_path: Path) -> None:
    run = contents(read_run(write_run(tmp_path, trace=False)), {})
    assert run["parts"]["source"] == "metrics"
    assert {row["part"]: row["measured"] for row in run["parts"]["rows"]} == pytest.approx(
        {"exposed": 0.04, "compute": 0.46}
    )
    assert run["timeline"] is run["analysis"] is run["predicted"] is None


def test_gains_are_over_the_plan_of_the_run(tmp_path: Path) -> None:
    plans = [{"plan": "data=2 zero=1", "seconds": 2.0}, {"plan": "data=1", "seconds": 8.0}]
    run = contents(read_run(write_run(tmp_path)), {"prediction": prediction(), "plans": plans})
    assert [plan["gain"] for plan in run["plans"]] == [1.0, -0.5]


def test_an_empty_run_has_no_figures_and_no_curves(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"state": "running", "events": 3, "job": [], "versions": 1}')
    run = contents(read_run(tmp_path), {})
    assert run["series"] == {}
    assert {value for value in run["figures"].values() if value} == set()
    assert (run["marks"], run["gates"], run["bytes"], run["job"]) == ([], [], [], [])


def test_differences_are_figures_and_the_settings_that_differ(tmp_path: Path) -> None:
    job = {"plan": "data=2 zero=1", "steps": 20, "batch": 8, "model": {"layers": 3}}
    first = contents(read_run(write_run(tmp_path, name="a")), {})
    second = contents(read_run(write_run(tmp_path, name="b", steps=30, job=job)), {})
    rows = {row["name"]: row["values"] for row in differences([first, second])}
    assert rows["steps made"] == ["20", "30"]
    assert rows["seconds of a step"] == ["500.0 ms", "500.0 ms"], "figures are always there"
    assert rows["model.layers"] == ["2", "3"]
    assert rows["plan"] == ["data=2", "data=2 zero=1"]
    assert "batch" not in rows


def test_a_short_curve_stays_as_it_is() -> None:
    assert thin(np.array([1.0, 2.0, 3.0]), np.array([0.5, math.nan, math.inf])) == {
        "x": [1, 2, 3],
        "y": [0.5, None, None],
    }


def test_a_long_curve_keeps_its_ends_and_every_spike() -> None:
    x = np.arange(1.0, 100_001.0)
    y = np.sin(x / 500)
    for place in (77, 50_000, 99_998):
        y[place] = 10.0 + place
        y[place + 1] = -10.0 - place
    y[30_000:40_000] = math.nan
    found = thin(x, y)
    assert len(found["x"]) <= MOST_POINTS + 2
    assert (found["x"][0], found["x"][-1]) == (1, 100_000)
    assert {10.0 + place for place in (77, 50_000, 99_998)} <= set(found["y"])
    assert {-10.0 - place for place in (77, 50_000, 99_998)} <= set(found["y"])
    assert None in found["y"]
    assert found["x"] == sorted(found["x"])
