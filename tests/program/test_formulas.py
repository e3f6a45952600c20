"""Every schedule has the bubble, microbatches in flight and versions of its formula, for any numbers."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.plan import SCHEDULES
from echelon.program import check, simulate
from tests.program import formulas
from tests.program.cases import Shape, shapes


@settings(deadline=None)
@given(shapes())
def test_every_schedule_passes_the_check_and_keeps_what_its_formula_says(shape: Shape) -> None:
    program = shape.program()
    check(program)
    line = simulate(program)
    assert line.in_flight == formulas.in_flight(shape.name, shape.replicas, shape.taken, shape.chunks)
    expected = formulas.versions(shape.name, len(shape.replicas), shape.taken, shape.microbatches)
    replicated = sum(shape.replicas) > len(shape.replicas)
    assert set(line.versions) == {1} if replicated else line.versions == expected


@settings(deadline=None)
@given(shapes(most_replicas=1))
def test_the_bubble_of_every_schedule_is_that_of_its_formula(shape: Shape) -> None:
    expected = formulas.bubble(shape.name, len(shape.replicas), shape.taken, shape.chunks)
    assert simulate(shape.program()).bubble_fraction == expected


def test_the_formulas_are_those_of_the_papers() -> None:
    bubbles = {
        "naive": Fraction(3, 4),
        "gpipe": Fraction(3, 11),
        "1f1b": Fraction(3, 11),
        "interleaved": Fraction(3, 19),
        "zero-bubble": Fraction(3, 19),
        "pipedream": Fraction(3, 11),
    }
    assert {name: formulas.bubble(name, 4, 8, 2) for name in bubbles} == bubbles
    assert formulas.in_flight("1f1b", (1,) * 4, 8) == (4, 3, 2, 1)
    assert formulas.in_flight("gpipe", (1,) * 4, 8) == (8, 8, 8, 8)
    assert formulas.in_flight("1f1b", (3, 1), 12) == (2, 2, 2, 1)
    assert formulas.versions("pipedream", 4, 24, 8) == (4, 3, 2, 1)
    assert formulas.versions("pipedream-vertical", 4, 24, 8) == (4, 4, 4, 4)
    assert formulas.versions("pipedream-2bw", 4, 24, 8) == (2, 2, 2, 2)
    assert formulas.versions("1f1b", 4, 24, 8) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("name", "taken", "versions"),
    [
        ("pipedream", 1, (1, 1, 1, 1)),
        ("pipedream", 2, (2, 2, 2, 1)),
        ("pipedream", 4, (2, 3, 2, 1)),
        ("pipedream", 5, (3, 3, 2, 1)),
        ("pipedream", 6, (4, 3, 2, 1)),
        ("pipedream-vertical", 2, (2, 2, 2, 2)),
        ("pipedream-vertical", 5, (3, 3, 3, 3)),
        ("pipedream-2bw", 8, (1, 1, 1, 1)),
        ("pipedream-2bw", 9, (2, 2, 2, 2)),
    ],
)
def test_versions_while_the_pipeline_fills(name: str, taken: int, versions: tuple[int, ...]) -> None:
    assert formulas.versions(name, 4, taken, 8) == versions


def test_the_formulas_with_few_microbatches() -> None:
    assert formulas.bubble("zero-bubble", 4, 4) == Fraction(3, 11)
    assert formulas.bubble("zero-bubble", 4, 2) == Fraction(4, 8)
    assert formulas.bubble("interleaved", 4, 8) == Fraction(3, 11), "one chunk is 1f1b"
    assert formulas.bubble("1f1b", 1, 5) == 0
    assert formulas.in_flight("interleaved", (1,) * 4, 4, 2) == (8, 8, 8, 8)
    assert formulas.in_flight("interleaved", (1,) * 4, 8, 2) == (11, 9, 7, 5)
    assert formulas.in_flight("interleaved", (1,) * 2, 4) == (3, 1)
    assert formulas.in_flight("naive", (1, 1), 3) == (1, 1)
    assert formulas.in_flight("zero-bubble", (1,) * 3, 5) == (3, 3, 3)
    assert formulas.in_flight("1f1b", (3, 1), 4) == (2, 1, 1, 1)


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(1, 20))
def test_zero_bubble_always_has_less_than_1f1b(stages: int, microbatches: int) -> None:
    assert formulas.bubble("zero-bubble", stages, microbatches) < formulas.bubble(
        "1f1b", stages, microbatches
    )


def test_no_schedule_is_left_out() -> None:
    """Every name that a plan can have builds a program of that name."""
    for name in SCHEDULES:
        program = Shape(name, (1, 1), 2, 2 if name == "interleaved" else 1).program()
        assert (program.name, program.stages) == (name, 4 if name == "interleaved" else 2)
