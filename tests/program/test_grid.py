"""Grids of ranks and time, as text."""

from fractions import Fraction

import pytest

from echelon.program import Costs, Instruction, Op, Span, build, simulate
from echelon.program.grid import draw, draw_words
from tests.program.cases import program_of


def grid(name: str, stages: int, microbatches: int, chunks: int = 1, costs: Costs | None = None) -> str:
    line = simulate(build(name, (1,) * stages, microbatches, chunks), costs)
    return draw(list(line.spans()), stages).text()


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (
            grid("1f1b", 2, 2),
            "time    0  1  2  3  4  5\n"
            "rank 0  F0 F1 ·  B0 ·  B1\n"
            "rank 1  ·  F0 B0 F1 B1 ·",
        ),
        (
            grid("1f1b", 2, 1, costs=Costs(backward=2)),
            "time    0  1  2  3  4  5\n"
            "rank 0  F0 ·  ·  ·  B0───\n"
            "rank 1  ·  F0 B0─── ·  ·",
        ),
        (
            grid("zero-bubble", 2, 1),
            "time    0     1     2     3\n"
            "rank 0  F0─── ·  ·  ·  I0 W0\n"
            "rank 1  ·  ·  F0─── I0 W0 ·",
        ),
        (
            grid("interleaved", 1, 1, 2),
            "time    0   1   2   3\n"
            "rank 0  F0a F0b B0b B0a",
        ),
        (
            grid("1f1b", 1, 1, costs=Costs(update=1, reduce=1)),
            "time    0  1  2  3\n"
            "rank 0  F0 B0 R  U",
        ),
    ],
)  # fmt: skip
def test_small_grids(shown: str, expected: str) -> None:
    assert shown == expected


def test_a_long_grid_is_cut_into_parts() -> None:
    line = simulate(build("1f1b", (1, 1), 20))
    parts = draw(list(line.spans()), 2).text(width=60).split("\n\n")
    assert len(parts) == 4
    assert all(part.startswith("time") and part.count("\n") == 2 for part in parts)
    assert max(len(row) for part in parts for row in part.splitlines()) <= 60
    assert sum(part.count("F") for part in parts) == 2 * 20


def test_measured_spans_are_drawn_by_the_nearest_tick() -> None:
    spans = [
        Span(0, 0.0, 0.0102, Instruction(Op.FORWARD, 0, 0)),
        Span(0, 0.0301, 0.0498, Instruction(Op.BACKWARD, 0, 0)),
    ]
    assert draw(spans, 1).text().splitlines()[1] == "rank 0  F0 ·  ·  B0───"


def test_very_fine_times_do_not_make_endless_lines() -> None:
    costs = Costs(forward=Fraction(1, 997), backward=1)
    line = simulate(build("1f1b", (1,) * 3, 40), costs)
    assert len(draw(list(line.spans()), 3).lines[0][1]) <= 2001


def test_words_stand_in_their_order_as_they_are_written() -> None:
    grid = draw_words([(0, [("F0", False), ("FO", True)]), (10, [])])
    assert grid.text() == "word     1    2\nrank 0   F0   [FO]\nrank 10"


def test_nothing_to_draw() -> None:
    assert draw([], 2).lines[1] == ("rank 0  ", [])


def test_the_length_of_a_column_can_be_given() -> None:
    spans = [
        Span(0, 0.0, 4.1, Instruction(Op.FORWARD, 0, 0)),
        Span(0, 4.2, 8.2, Instruction(Op.BACKWARD, 0, 0)),
    ]
    assert draw(spans, 1, tick=2.0).text() == "time    0  2  4  6\nrank 0  F0─── B0───"


def test_copies_have_rows_of_their_own() -> None:
    program = program_of("rank 0: F0 S0 F1 T0 B0 B1 REDUCE NORM UPDATE PUBLISH")
    line = simulate(program, Costs(store=1, fetch=1))
    assert draw(list(line.spans()), 1).text() == "\n".join(
        [
            "time    0  1  2  3  4",
            "rank 0  F0 F1 ·  B0 B1",
            "  out   ·  S0 ·  ·  ·",
            "  in    ·  ·  T0 ·  ·",
        ]
    )
