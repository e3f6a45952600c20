"""echelon schedule --measure: the measured bubble beside the simulated one, and what cannot be measured."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from echelon.launching import Ranks
from echelon.train import rehearsal
from tests.cli.schedule_output import output


@pytest.fixture
def _measuring(warm_ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "Ranks", lambda count: nullcontext(warm_ranks(count)))


@pytest.mark.usefixtures("_measuring")
@pytest.mark.parametrize(
    ("arguments", "costs"),
    [
        (["1f1b", "--stages", "2"], {"forward", "backward", "update"}),
        pytest.param(
            ["zero-bubble", "--stages", "2"],
            {"forward", "backward_input", "backward_weight", "update"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["pipedream", "--stages", "2"], {"forward", "backward", "update"}, marks=pytest.mark.slow
        ),
    ],
)
def test_the_measured_bubble_stands_beside_that_of_the_measured_costs(
    capsys: pytest.CaptureFixture[str], arguments: list[str], costs: set[str]
) -> None:
    code, out, err = output(capsys, *arguments, "--microbatches", "2", "--measure", "--json")
    assert (code, err) == (0, "")
    summary = json.loads(out)
    assert 0 < summary["bubble_fraction"] < 1
    assert 0 < summary["bubble_measured"] < 1
    assert summary["bubble_measured"] in summary["bubbles_measured"]
    assert set(summary["costs_measured"]) == costs | {"transfer"}
    assert all(seconds > 0 for seconds in summary["costs_measured"]["forward"])
    assert summary["seconds_measured"] > summary["batches"] * 2 * min(summary["costs_measured"]["forward"])
    assert summary["model"]["layers"] == 4


@pytest.mark.slow
@pytest.mark.usefixtures("_measuring")
def test_what_was_measured_is_drawn_above_the_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file, out = tmp_path / "mine.txt", tmp_path / "a.svg"
    file.write_text("rank 0: F0 F1 B0 B1\nrank 1: F0 B0 F1 B1\n")
    code, shown, err = output(capsys, str(file), "--measure", "--out", str(out))
    assert (code, err) == (0, "")
    assert "measured (median of 9 turns)" in shown
    assert "simulated with the measured costs" in shown
    assert "a GPT of 4 blocks on 2 ranks of this machine" in shown
    assert [shown.count(f"rank {rank}") for rank in (0, 1)] == [2, 2]
    picture = out.read_text()
    assert "2 stages, 2 microbatches: measured" in picture
    assert picture.index(": measured") < picture.index("simulated with the measured costs")
    assert [picture.count(f">{name}<") for name in ("F0", "B1", "rank 1")] == [4, 4, 2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--stages", "2", "--update", "1", "--text"],
            ["2 errors", "--update with", "--text with --measure"],
        ),
        (["--stages", "2", "--backward-input", "0"], ["--backward-input with --measure"]),
        (["--stages", "40"], ["2 errors", "40 ranks", "1600 forwards: at most 1000"]),
        (["--stages", "1"], ["1 ranks: it needs 2 to 16"]),
    ],
)
def test_what_cannot_be_measured_is_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: list[str]
) -> None:
    code, out, err = output(capsys, "gpipe", "--microbatches", "40", *arguments, "--measure")
    assert (code, out) == (2, "")
    for part in says:
        assert part in err


def test_measuring_under_torchrun_and_versions_from_a_file_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.txt"
    assert output(capsys, "pipedream", "--stages", "2", "--microbatches", "2", "--out", str(file))[0] == 0
    monkeypatch.setattr("echelon.cli.schedule_measure.is_under_torchrun", lambda: True)
    code, _, err = output(capsys, str(file), "--measure")
    assert code == 2
    assert "without torchrun" in err
    assert "weight versions cannot run" in err
