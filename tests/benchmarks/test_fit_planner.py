"""The fit of the planner's figures: it lowers the error, and folds do not see what they are judged by."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.fit_planner import errors, fit, folds, load, main, score, start

from echelon.planner.validate.rows import Run, run_of
from tests.planner.validate.test_rows import ROW


def write(path: Path) -> Path:
    rows = [
        ROW | {"model": f"GPT {layers}", "layers": str(layers), "step_time_s": str(0.2 * layers)}
        for layers in (48, 96, 72)
    ]
    rows.append(ROW | {"gpu": "TPU"})
    lines = [",".join(ROW), *(",".join(row.values()) for row in rows)]
    path.write_text("\n".join(lines))
    return path


def test_a_fit_lowers_the_error(tmp_path: Path) -> None:
    runs = load([write(tmp_path / "runs.csv")], ("a100",), 1)
    assert len(runs) == 3
    figures = start()
    fitted = fit(runs, figures, steps=14)
    assert score(runs, fitted) < score(runs, figures)
    assert set(errors(runs, fitted)) == {"a paper"}


def test_what_hosts_take_is_fitted_alone(tmp_path: Path) -> None:
    runs = load([write(tmp_path / "runs.csv")], ("a100",), 1)
    longer = start(("host_step", "host_layer")) | {"host_step": 1000.0}
    before, after = (errors(runs, each)["a paper"] for each in (start(()), longer))
    steps = [
        run.seconds * (math.exp(late) - math.exp(early))
        for run, early, late in zip(runs, before, after, strict=True)
    ]
    assert steps == pytest.approx([999 * run.practice.host_step * (1 + stragglers(run)) for run in runs])


def stragglers(run: Run) -> float:
    return run.cluster.stragglers * math.log2(run.settings.ranks / run.cluster.per_node)


def test_a_test_and_its_form_for_one_node_are_one_model() -> None:
    run = run_of(ROW)
    names = ("gpt/a/golden_values_x.json", "gpt/a_1node/golden_values_y.json", "gpt/b/golden_values_x.json")
    runs = [run._replace(shape=replace(run.shape, name=name)) for name in names]
    parts = [{each.shape.name for each in held} for _, held in folds(runs, 2)]
    assert sorted(map(len, parts)) == [1, 2]
    assert {names[2]} in parts


def test_folds_share_no_model(tmp_path: Path) -> None:
    runs = load([write(tmp_path / "runs.csv")], ("a100",), 1)
    held = []
    for seen, unseen in folds(runs, 3):
        assert not {run.shape.name for run in seen} & {run.shape.name for run in unseen}
        held += unseen
    assert len(held) == len(runs)


@pytest.mark.slow
def test_the_script_prints_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write(tmp_path / "runs.csv"))
    main([file, "--devices", "a100"])
    assert "errors of the runs that were fitted" in capsys.readouterr().out
    main([file, "--devices", "a100", "--figures", "host_pace"])
    assert "{'host_pace': " in capsys.readouterr().out
    main([file, "--devices", "a100", "--folds", "3"])
    assert "that were not fitted" in capsys.readouterr().out
