"""echelon plan, as a person and as a program runs it."""

import json
import tomllib
from pathlib import Path

import pytest

from echelon.cli.main import run
from echelon.cli.plan import show_trials
from echelon.models import preset
from echelon.models.hf.config import config_to_hf
from echelon.train import rehearsal
from echelon.train.jobs.job_file import read_job
from echelon.train.rehearsal import Trial, Work
from tests.planner.validate.test_rows import ROW

BASE = ["plan", "llama3-8b", "--cluster", "h100:8", "--batch", "16", "--sequence", "4096"]


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_best_plans_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BASE, "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert "plan" in out
    assert "MFU" in out
    assert "plans cut" in out
    found = as_json(capsys, *BASE, "--top", "3")
    assert len(found["plans"]) == 3
    assert found["plans"][0]["step_seconds"] <= found["plans"][1]["step_seconds"]
    assert found["plans"][0]["fits"]


def test_one_plan_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*BASE, "--plan", "data=8 zero=3 precision=bf16"]
    assert run(words) == 0
    assert "tokens/s" in capsys.readouterr().out
    predicted = as_json(capsys, *words)
    assert predicted["plan"] == "data=8 zero=3 precision=bf16"
    assert set(predicted["memory"][0]) > {"parameters", "gradients", "optimizer", "activations", "buffers"}


def test_the_best_plan_is_written_as_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.toml"
    assert run([*BASE, "--emit", str(file)]) == 0
    job = tomllib.loads(file.read_text())
    assert job["batch"] == 16
    assert job["sequence"] == 4096
    assert job["model"] == {"preset": "llama3-8b"}
    found = as_json(capsys, *BASE) if capsys.readouterr() else {}
    assert job["plan"] == found["plans"][0]["plan"]
    assert read_job(file).plan == job["plan"]
    assert run([*BASE, "--emit", str(tmp_path / "no" / "job.toml")]) == 2


def test_an_optimizer_is_predicted_and_part_of_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*BASE, "--plan", "data=8 zero=1 precision=bf16 microbatches=2"]
    file = tmp_path / "job.toml"
    small, large = (as_json(capsys, *words, "--optimizer", name) for name in ("adafactor", "adamw"))
    assert small["memory"][0]["optimizer"] == pytest.approx(large["memory"][0]["optimizer"] / 3)
    assert run([*words, "--optimizer", "adafactor", "--emit", str(file)]) == 0
    assert read_job(file).optimizer.name == "adafactor"
    assert run([*words, "--optimizer", "adam"]) == 2
    assert run([*words, "--optimizer", "sgd", "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert "--optimizer adam: must be one of adamw" in err
    assert "run with adamw" in err


def test_a_job_for_a_folder_of_hugging_face_has_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(config_to_hf(preset("llama-tiny"), "bfloat16")))
    words = ["--cluster", "h100:1", "--batch", "2", "--plan", "data=1", "--emit", str(tmp_path / "job.toml")]
    assert run(["plan", str(config), *words]) == 0
    assert tomllib.loads((tmp_path / "job.toml").read_text())["model"] == {"weights": str(tmp_path)}
    assert run(["plan", "gpt-530b", *words]) == 2
    assert "is only a shape" in capsys.readouterr().err


def test_bad_input_lists_every_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "llama3-8x", "--cluster", "h100:0", "--batch", "0", "--precision", "int8"]) == 2
    err = capsys.readouterr().err
    for part in ("llama3-8x", "'0' devices", "--batch 0", "--precision int8"):
        assert part in err
    assert run(["plan"]) == 2
    err = capsys.readouterr().err
    for part in ("MODEL", "--cluster", "--batch"):
        assert part in err


def test_a_plan_that_does_not_divide_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BASE, "--plan", "tensor=3"]) == 2
    assert "do not divide evenly" in capsys.readouterr().err


def test_a_model_that_fits_nowhere_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "llama3-405b", "--cluster", "a100-40:8", "--batch", "8", "--sequence", "2048"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_published_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.csv"
    file.write_text("\n".join([",".join(ROW), ",".join(ROW.values())]))
    sources = as_json(capsys, "plan", "--validate", str(file))["sources"]
    assert set(sources) == {"a paper"}
    assert set(sources["a paper"]) == {
        "rows", "refused", "mean_error", "median_error", "max_error", "memory_mean_error",
    }  # fmt: skip
    assert run(["plan", "--validate", str(file)]) == 0
    assert "a paper" in capsys.readouterr().out
    assert run(["plan", "--validate", str(tmp_path / "none.csv")]) == 2


TINY = ["plan", "gpt-tiny", "--batch", "8", "--precision", "fp32"]
H100 = [*TINY, "--cluster", "h100:2"]


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
    row = next(line for line in out.splitlines() if "│ parameters" in line)
    cells = [cell.strip() for cell in row.replace("│", "|").split("|")]
    assert cells[2] == cells[3]


@pytest.mark.slow
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
    assert run([*TINY, "--cluster", "cpu:2", "--measure", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["plan"] for each in found["measured"]] == [seen[2], seen[1], seen[0]]
    assert found["measured"][-1]["error"] == "out of memory"
    seen.clear()
    assert run([*TINY, "--cluster", "cpu:2", "--measure", "3"]) == 0
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
    show_trials(trials, (Found("data=1", prediction), Found("zero=0", prediction)), screen)
    text = screen.export_text()
    assert "it failed" in text
    assert "The fastest here: data=1" in text
