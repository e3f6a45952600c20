"""Runs: which elements of a sample a rank has, by hand."""

import pytest

from echelon.nn.dropout.mask import Runs, runs_of


@pytest.mark.parametrize(
    ("shape", "has_indices", "part", "expected"),
    [
        ((8,), False, None, Runs(1, 1)),
        ((8, 5, 6), False, None, Runs(1, 30)),
        ((8, 5, 6), True, None, Runs(5, 6)),
        ((8, 5), True, None, Runs(5, 1)),
        ((8, 6), False, (1, 2), Runs(1, 6, 1, 1, 2)),
        ((8, 5, 6), True, (1, 2), Runs(5, 6, 1, 1, 2)),
        ((8, 5, 3, 6), False, (2, 4), Runs(15, 6, 3, 2, 4)),
    ],
)
def test_runs_of_a_shape(
    shape: tuple[int, ...], has_indices: bool, part: tuple[int, int] | None, expected: Runs
) -> None:
    assert runs_of(shape, has_indices=has_indices, feature_part=part) == expected


def test_runs_of_an_odd_length_share_words() -> None:
    assert Runs(5, 6).has_whole_words
    assert not Runs(5, 3).has_whole_words
