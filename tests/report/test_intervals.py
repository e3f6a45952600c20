"""Sets of times."""

import random

from echelon.report.intervals import common, length, union, without


def test_the_examples_of_the_docstrings() -> None:
    assert union([(0, 2), (1, 3), (5, 6), (7, 7)]) == [(0, 3), (5, 6)]
    assert common([(0, 3)], [(1, 2), (2.5, 9)]) == [(1, 2), (2.5, 3)]
    assert without([(0, 3)], [(1, 2)]) == [(0, 1), (2, 3)]


def test_they_agree_with_sets_of_integers() -> None:
    draw = random.Random(0)
    for _ in range(300):
        sets = []
        for _ in range(2):
            starts = [draw.randrange(30) for _ in range(draw.randrange(6))]
            sets.append(union((start, start + draw.randrange(1, 8)) for start in starts))
        first, second = ({n for start, end in each for n in range(int(start), int(end))} for each in sets)
        for found, wanted in (
            (common(*sets), first & second),
            (without(*sets), first - second),
            (union([*sets[0], *sets[1]]), first | second),
        ):
            assert {n for start, end in found for n in range(int(start), int(end))} == wanted
            assert length(found) == len(wanted)
