import pytest
from benchmarks.compare import Spread, compare, slowest


def test_a_spread_is_the_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(2.0, 3.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_ratios_are_paired_so_a_drifting_machine_does_not_show() -> None:
    """The machine becomes ten times slower each round; medians of either alone say nothing."""
    rows = compare("case", {"base": [1.0, 10.0, 100.0], "twice": [2.0, 20.0, 200.0]}, "base")

    base, twice = rows
    assert (twice.case, twice.contender, twice.baseline) == ("case", "twice", "base")
    assert twice.ratio == Spread(2.0, 2.0, 2.0)
    assert base.ratio == Spread(1.0, 1.0, 1.0)
    assert twice.seconds == Spread(11.0, 20.0, 110.0)


def test_the_median_of_ratios_is_not_the_ratio_of_medians() -> None:
    rows = compare("case", {"base": [1.0, 2.0, 9.0], "other": [3.0, 2.0, 3.0]}, "base")
    assert rows[1].ratio.median == 1.0
    assert rows[1].seconds.median / rows[0].seconds.median == 1.5


def test_rounds_must_pair() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare("case", {"base": [1.0, 2.0], "other": [1.0]}, "base")


def test_the_slowest_rank_counts_in_each_round() -> None:
    ranks = [{"a": [1.0, 5.0], "b": [1.0, 1.0]}, {"a": [2.0, 3.0], "b": [0.5, 4.0]}]
    assert slowest(ranks) == {"a": [2.0, 5.0], "b": [1.0, 4.0]}
