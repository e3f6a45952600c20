"""Grids of ranks and time, as text."""

from fractions import Fraction

import pytest

from echelon.program import Costs, Instruction, Op, Span, build, simulate
from echelon.program.grid import Tick, _times, _unit, draw, draw_words, labels
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


def test_marked_spans_stand_in_brackets() -> None:
    spans = [make_span(Op.FORWARD, 0, 1), make_span(Op.BACKWARD, 1, 3)]
    assert draw(spans, 1, spans[1:]).lines == (
        ("time    ", [Tick("0    "), Tick("1    "), Tick("2    ")]),
        (
            "rank 0  ",
            [
                Tick("F0   ", Op.FORWARD),
                Tick("[B0]─", Op.BACKWARD, marked=True),
                Tick("──── ", Op.BACKWARD, marked=True),
            ],
        ),
    )


def make_span(op: Op, start: float | Fraction, end: float | Fraction, stage: int = 0) -> Span:
    return Span(0, start, end, Instruction(op, stage, 0))


def test_words_are_marked_cut_and_filled_up() -> None:
    grid = draw_words([(0, [("A" * 17, True), ("B", False)]), (1, [("C" * 18, False)])])
    assert grid.lines == (
        ("word    ", [Tick(f"{1:<19}"), Tick(f"{2:<19}")]),
        ("rank 0  ", [Tick(f"[{'A' * 16}] ", marked=True), Tick(f"{'B':<19}")]),
        ("rank 1  ", [Tick("C" * 18 + " "), Tick(" " * 19)]),
    )
    assert draw_words([(0, [])]).text() == "word\nrank 0"
    assert draw_words([]).lines == (("word    ", []),)


def test_a_part_is_as_wide_as_it_may_be() -> None:
    grid = draw([make_span(Op.FORWARD, k, k + 1) for k in range(5)], 1)  # a label of 8, columns of 3
    columns = [
        [len(block[0][1]) for block in grid.blocks(width)] for width in (8 + 15, 8 + 14, 8 + 6, 8 + 2, 0)
    ]
    assert columns == [[5], [4, 1], [2, 2, 1], [1] * 5, [1] * 5]
    assert list(draw([], 1).blocks(10)) == [(("time    ", []), ("rank 0  ", []))]
    assert [len(block[0][1]) for block in draw([make_span(Op.FORWARD, 0, 1)], 1).blocks(0)] == [1]
    spans = [make_span(Op.FORWARD, k, k + 1) for k in range(34)]
    assert draw(spans, 1).text().count("time") == 1, "110 characters are one part"
    assert draw(spans, 11).text().count("time") == 2, "111 are two"


def test_the_stages_of_a_rank_are_letters_and_then_numbers() -> None:
    spans = [make_span(Op.FORWARD, 0, 1, stage) for stage in range(3, 30)]
    assert [labels(spans)[place] for place in (0, 1, 25, 26)] == ["F0a", "F0b", "F0z", "F0.26"]
    of_rank = [
        Span(0, 0, 1, Instruction(op, 3)) for op in (Op.NORM, Op.UPDATE, Op.TIE, Op.PUBLISH, Op.REDUCE)
    ]
    assert labels([*spans, *of_rank])[-5:] == ["N", "U", "T", "P", "Ra"]
    assert labels([Span(0, 0, 1, Instruction(Op.STASH, 0, version=7))]) == ["STASH7"]


def test_the_unit_divides_every_time_but_gives_at_most_2000_columns() -> None:
    assert _unit([]) == 1
    assert _unit([make_span(Op.FORWARD, Fraction(1, 6), Fraction(1, 4))]) == Fraction(1, 12)
    assert _unit([make_span(Op.FORWARD, 4, 10)]) == 2
    assert _unit([make_span(Op.FORWARD, 0, 2000), make_span(Op.FORWARD, 0, 1)]) == 1
    assert _unit([make_span(Op.FORWARD, 0, 4000), make_span(Op.FORWARD, 0, 1)]) == 2
    # Of measured times the shortest span, but at most 200 columns.
    assert _unit([make_span(Op.FORWARD, 0, 0.25), make_span(Op.BACKWARD, 1.0, 3.0)]) == 0.25
    assert _unit([make_span(Op.FORWARD, 0.0, 0.001), make_span(Op.BACKWARD, 1.0, 3.0)]) == 3 / 200


def test_times_stand_over_as_many_columns_as_there_is_room_for() -> None:
    assert [tick.text for tick in _times(4, 3, Fraction(1, 3))] == ["0  ", "   ", "   ", "1  "]
    assert "".join(tick.text for tick in _times(12, 3, 100)) == "0     200   400   600   800   1000  "
    assert [tick.text for tick in _times(3, 4, 100)] == ["0   ", "100 ", "200 "]
    assert _times(0, 3, 1) == []
