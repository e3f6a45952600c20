"""Targets: which rows they cover, when one is missed, and that each is of rows that a bench has."""

from pathlib import Path

import pytest
from benchmarks.result import read
from benchmarks.targets import TARGETS, Target, missed

from benchmarks import Row, Spread, benches

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ONE = Spread(1.0, 1.0, 1.0)


def row(contender: str, ratio: float, **extras: float) -> Row:
    return Row("1f1b", contender, "torch", ONE, Spread(0.1, ratio, 9.0), extras)


def test_a_target_is_missed_by_the_median_of_the_rows_that_it_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "toy", (Target(0.97, "here", "1f*"),))
    assert missed("toy", [row("torch", 1.0), row("echelon", 0.97)]) == []
    assert missed("toy", [row("torch", 1.0), row("echelon", 0.98)]) == [
        "1f1b, echelon beside torch: ratio ≤ 0.97 does not hold: it is 0.98 (here)"
    ]


@pytest.mark.parametrize(("peak", "met"), [(2048, True), (2049, False)])
def test_a_limit_may_be_another_figure_of_the_row(
    monkeypatch: pytest.MonkeyPatch, peak: int, met: bool
) -> None:
    target = Target("limit_bytes", "here", figure="peak_bytes")
    monkeypatch.setitem(TARGETS, "toy", (target,))
    measured = row("echelon", 1.0, peak_bytes=peak, limit_bytes=2048)
    assert target.show(measured) == "peak bytes ≤ 2.0 KiB"
    assert (missed("toy", [measured]) == []) == met


def test_a_share_may_have_a_lowest_value_and_a_figure_that_is_missing_meets_nothing() -> None:
    target = Target(0.85, "here", figure="share_of_dense", at_least=True)
    assert target.is_met(row("echelon", 1.0, share_of_dense=0.86))
    assert not target.is_met(row("echelon", 1.0, share_of_dense=0.84))
    assert not target.is_met(row("echelon", 1.0))


def test_a_target_without_rows_is_missed_unless_only_a_part_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(TARGETS, "toy", (Target(1.0, "here", contender="renamed"),))
    (sentence,) = missed("toy", [row("echelon", 1.0)])
    assert sentence.startswith("no row is '*' with contender 'renamed'")
    assert missed("toy", [row("echelon", 1.0)], partial=True) == []


@pytest.mark.parametrize("name", TARGETS)
def test_targets_are_of_benches_and_of_figures_that_their_results_have(name: str) -> None:
    assert name in benches()
    rows = read(RESULTS / f"{name}.json").rows
    for target in TARGETS[name]:
        covered = [each for each in rows if target.covers(each)]
        assert covered
        for each in covered:
            assert target.show_measured(each) != "not measured"
            assert not target.show(each).endswith("_bytes"), "the limit is not a figure of the row"
