"""`echelon bench`: which benches run, what is printed, what is kept."""

import json
from pathlib import Path

import pytest

from echelon import bench
from echelon.bench import Result, Row, Spread
from tests.cli.commands import output

RAN: list[tuple[str, bool]] = []


def fake_run(name: str, *, quick: bool = False) -> Result:
    RAN.append((name, quick))
    middle = Spread(1.0, 2.0, 3.0)
    row = Row("1 device", "echelon", "torch loop", middle, middle)
    hardware = {"cores": 2, "cpu": "a cpu", "gpus": []}
    return Result(name, f"echelon bench {name}", None, "2026-01-01", {"torch": "2"}, hardware, {}, (row,))


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    RAN.clear()
    monkeypatch.setattr(bench, "run", fake_run)


def test_one_bench_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = output(capsys, "bench", "step", "--quick", "--out", str(tmp_path))
    assert (code, err, RAN) == (0, "", [("step", True)])
    assert "echelon bench step" in out
    assert json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))["name"] == "step"


def test_all_benches_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(capsys, "bench", "--json")
    assert code == 0
    assert [name for name, _ in RAN] == bench.runnable(quick=False)
    assert [result["name"] for result in json.loads(out)["results"]] == bench.runnable(quick=False)


def test_a_bench_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, "bench", "stp")
    assert (code, RAN) == (2, [])
    assert "did you mean 'step'?" in err
