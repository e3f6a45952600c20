"""`echelon verify`: its options, its exit codes, and what it prints."""

import json

import pytest

from echelon.cli.main import run

SMALL = [f"--set={setting}" for setting in ("model.layers=1", "model.width=32", "model.heads=2")]


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["verify", *arguments])
    captured = capsys.readouterr()
    return code, " ".join(captured.out.split()), captured.err


def test_bf16_prints_both_distances_and_takes_five_steps(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(capsys, "--plan", "data=2", "--precision", "bf16", *SMALL)
    assert code == 0, out
    assert "within rounding of one device in bf16 after 5 steps: weights differ by" in out
    assert out.count("rounding ") >= 2
    assert out.count("allowed ") == 2


def test_bf16_finds_an_injected_bug_and_reports_it_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    bug = ["--precision=bf16", "--inject-bug=divide-twice", "--json"]
    code, out, err = output(capsys, "--plan", "data=2", *bug, *SMALL)
    verdict = json.loads(out)
    assert (code, verdict["holds"], err) == (1, False, "")
    assert verdict["worst"]["plan"] > verdict["worst"]["allowed"]
    assert verdict["weights"].keys() == {"plan", "rounding", "allowed"}
    assert verdict["plan"] == "data=2 precision=bf16"


def test_another_precision_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, "--precision", "fp8")
    assert code == 2
    assert "--precision fp8: must be fp64, bf16 or fp16" in err


def test_all_errors_of_options_and_job_come_together(capsys: pytest.CaptureFixture[str]) -> None:
    # The first was reported alone, and numbers in pydantic's words.
    options = ["--steps", "１２", "--precision", "fp32", "--inject-bug", "x", "--set", "steps=true"]
    code, out, err = output(capsys, *options)
    assert (code, out) == (2, "")
    assert err.startswith("error: 4 errors in echelon verify:")
    starts = ("--steps １２: must be an integer", "--precision fp32", "--inject-bug x", "steps=true")
    assert all(start in err for start in starts)


def test_a_bug_that_a_plan_cannot_have_starts_no_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.verify.contract._train", lambda *_: pytest.fail("ranks were started"))
    code, _, err = output(capsys, "--inject-bug=skip-bucket", "--plan", "data=2 sync=parameter-server")
    assert code == 2
    assert "--inject-bug needs sync=all-reduce" in err
