"""`echelon plan --dry-run` and `--measure`, as a person and as a program runs them."""

import json

import pytest

from echelon.cli import plan_checks
from echelon.cli.main import run
from echelon.train import rehearsal
from echelon.train.rehearsal import Trial, Work

BASE = ["plan", "gpt-tiny", "--batch", "8", "--precision", "fp32"]
H100 = [*BASE, "--cluster", "h100:2"]


def test_a_dry_run_stands_beside_its_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*H100, "--plan", "data=2 zero=1", "--dry-run", "--rank", "1"]
    assert run(words) == 0
    out = capsys.readouterr().out
    for part in ("rank 1", "predicted", "code", "reduce_scatter", "gradients", "instructions"):
        assert part in out
    assert run([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    code = found["dry_run"]
    assert (code["rank"], code["ranks"]) == (1, 2)
    assert found["memory"][0]["optimizer"] == pytest.approx(code["memory"]["peak"]["optimizer"], rel=0.02)


def test_the_stage_of_a_rank_is_the_one_that_was_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*H100, "--plan", "pipeline=2 microbatches=2", "--dry-run", "--rank", "1"]
    assert run(words) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "parameters" in line)
    cells = [cell.strip() for cell in row.replace("│", "|").split("|")]
    assert cells[2] == cells[3]


def test_what_was_measured_decides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def try_plans(_: Work, plans: list[str]) -> list[Trial]:
        seen.extend(plans)
        return [
            Trial(plans[0], None, None, "out of memory"),
            Trial(plans[1], 2.0, 9),
            Trial(plans[2], 1.0, 9),
        ]

    monkeypatch.setattr(rehearsal, "try_plans", try_plans)
    assert run([*BASE, "--cluster", "cpu:2", "--measure", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["plan"] for each in found["measured"]] == [seen[2], seen[1], seen[0]]
    assert found["measured"][-1]["error"] == "out of memory"
    seen.clear()
    assert run([*BASE, "--cluster", "cpu:2", "--measure", "3"]) == 0
    assert "The fastest here: " in capsys.readouterr().out


def test_plans_run_here_and_nowhere_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*H100, "--measure", "1"]) == 2
    assert "--measure runs on this machine, which is not h100:2" in capsys.readouterr().err
    assert run([*H100, "--measure", "x", "--rank", "-1"]) == 2
    err = capsys.readouterr().err
    assert "--measure x" in err
    assert "--rank -1" in err


def test_only_a_shape_cannot_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt-530b", "--cluster", "h100:1024", "--batch", "1024", "--dry-run"]
    assert run([*words, "--plan", "data=128 tensor=8"]) == 2
    assert "only a shape" in capsys.readouterr().err


def test_a_table_names_plans_that_failed() -> None:
    from rich.console import Console

    from echelon.planner.cluster.read import read_cluster
    from echelon.planner.foresight.predict import predict
    from echelon.planner.searching.search import Found
    from echelon.planner.shape.presets import preset_shape

    prediction = predict(preset_shape("gpt-tiny"), "data=1", read_cluster("h100:1"), 8)
    screen = Console(record=True, width=120)
    trials = [Trial("data=1", 1.0, 10), Trial("zero=0", None, None, "it failed")]
    plan_checks.show_trials(trials, (Found("data=1", prediction), Found("zero=0", prediction)), screen)
    text = screen.export_text()
    assert "it failed" in text
    assert "The fastest here: data=1" in text
