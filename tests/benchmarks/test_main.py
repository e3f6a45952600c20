"""`python -m benchmarks`: which benches run, what is printed, what is kept."""

import json
from pathlib import Path

import pytest
from benchmarks.__main__ import NAMES, run_words
from benchmarks.targets import Target

import benchmarks
from benchmarks import Result, Row, Spread, targets

RAN: list[tuple[str, bool]] = []


def output(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run_words(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def fake_run(name: str, *, quick: bool = False, only: str = "") -> Result:
    assert only == ""
    RAN.append((name, quick))
    middle = Spread(1.0, 2.0, 3.0)
    row = Row("1 device", "echelon", "torch loop", middle, middle)
    hardware = {"cores": 2, "cpu": "a cpu", "gpus": []}
    return Result(
        name, f"python -m benchmarks {name}", None, "2026-01-01", {"torch": "2"}, hardware, {}, (row,)
    )


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    RAN.clear()
    monkeypatch.setattr(benchmarks, "run", fake_run)
    monkeypatch.setattr(targets, "TARGETS", {"step": (Target(2.0, "a promise"),)})


def test_one_bench_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = output(capsys, "step", "--quick", "--out", str(tmp_path))
    assert (code, err, RAN) == (0, "", [("step", True)])
    assert "python -m benchmarks step" in out
    assert json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))["name"] == "step"


def test_all_benches_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(capsys, "--json")
    assert code == 0
    assert [name for name, _ in RAN] == benchmarks.runnable(quick=False)
    assert [result["name"] for result in json.loads(out)["results"]] == benchmarks.runnable(quick=False)


@pytest.mark.parametrize("place", ["file", "file/below", "step.json", "new.json"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, place: str
) -> None:
    # The measuring was done, and then lost.
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "step.json").mkdir()
    out = tmp_path if place == "step.json" else tmp_path / place
    code, _, err = output(capsys, "step", "--out", str(out))
    assert (code, RAN) == (2, [])
    assert f"--out {out}: " in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "step.json"]


def test_a_disk_that_fails_afterwards_is_no_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    code, out, err = output(capsys, "step", "--out", str(tmp_path))
    assert code == 2
    assert "python -m benchmarks step" in out, "the figures are shown all the same"
    assert "step.json cannot be written: No space left on device" in err


def test_a_target_that_is_missed_is_told_with_exit_code_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert output(capsys, "step")[::2] == (0, "")
    monkeypatch.setattr(targets, "TARGETS", {"step": (Target(1.9, "a promise"),)})
    code, out, err = output(capsys, "step", "--out", str(tmp_path))
    sentence = "step: 1 device, echelon beside torch loop: ratio ≤ 1.9 does not hold: it is 2 (a promise)"
    assert (code, err) == (1, f"target missed: {sentence}\n")
    assert "python -m benchmarks step" in out, "the figures are shown"
    assert (tmp_path / "step.json").exists(), "and kept"
    code, out, _ = output(capsys, "step", "--json")
    assert (code, json.loads(out)["missed"]) == (1, [sentence])
    assert output(capsys, "step", "--quick")[::2] == (0, "")


def test_the_help_lists_all_benches(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = output(capsys, "--help")
    assert all(name in out for name in benchmarks.benches())
    assert all(name in NAMES for name in benchmarks.benches())


def test_a_bench_without_its_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, err = output(capsys, "one-gpu")
    assert (code, RAN) == (2, [])
    assert "measures a GPU, and torch sees none here" in err


def test_a_bench_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, "stp")
    assert (code, RAN) == (2, [])
    assert "did you mean 'step'?" in err
