"""echelon plan, as a person and as a program runs it."""

import json
import tomllib
from pathlib import Path

import pytest

from echelon.cli.main import run
from echelon.models import preset
from echelon.models.hf.config import config_to_hf
from echelon.train.jobs.job_file import read_job
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
