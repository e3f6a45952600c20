"""Programs print and parse to themselves: golden files, and all errors with their lines."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.program import Costs, Instruction, Op, Program, Span, add_gathers, build, parse, show, simulate
from echelon.program.text import Tick, _times, _unit, draw, draw_words, labels
from tests.program.cases import Shape, program_of, programs, shapes

GOLDEN = Path(__file__).parent / "golden"
EXAMPLES = {
    "naive": Shape("naive", (1,) * 3, 3),
    "gpipe": Shape("gpipe", (1,) * 3, 4),
    "1f1b": Shape("1f1b", (1,) * 4, 5),
    "1f1b-replicated": Shape("1f1b", (3, 1), 6),
    "interleaved": Shape("interleaved", (1,) * 2, 4, 2),
    "zero-bubble": Shape("zero-bubble", (1,) * 3, 4),
    "pipedream": Shape("pipedream", (1,) * 3, 5),
    "pipedream-vertical": Shape("pipedream-vertical", (1,) * 3, 5),
    "pipedream-2bw": Shape("pipedream-2bw", (1,) * 2, 2, batches=3),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_schedule_is_that_of_its_golden_file(name: str) -> None:
    text = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    program = EXAMPLES[name].program()
    assert show(program) == text
    assert parse(text).program == program


def test_golden_files_and_schedules_are_the_same() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == EXAMPLES.keys()


@settings(deadline=None)
@given(shapes(), st.booleans())
def test_every_schedule_parses_to_itself(shape: Shape, gathered: bool) -> None:
    program = add_gathers(shape.program()) if gathered else shape.program()
    assert parse(show(program)).program == program


@settings(deadline=None)
@given(programs())
def test_any_program_parses_to_itself(program: Program) -> None:
    assert parse(show(program)).program == program


def test_a_handwritten_program() -> None:
    text = """
    # two stages, one microbatch: the stage may be named, marks stand in any order
    rank 1:RA0<0 F0@1v0 B0v0@1 SG0@1>0   # the last stage

    rank 0: F0 SA0>1 RG0<1@0 B0
    """
    program = program_of(text)
    assert (program.name, program.stages, program.microbatches) == ("schedule", 2, 1)
    assert program.ranks[1] == (
        Instruction(Op.RECV_ACTIVATION, 1, 0, 0),
        Instruction(Op.FORWARD, 1, 0, version=0),
        Instruction(Op.BACKWARD, 1, 0, version=0),
        Instruction(Op.SEND_GRADIENT, 1, 0, 0),
    )
    assert parse(text, "mine").program == replace(program, name="mine")
    assert parse(text).lines == {1: 3, 0: 5}


def test_an_instruction_of_the_whole_rank_names_no_stage() -> None:
    text = "stage 0: 0\nstage 1: 0\nrank 0: REDUCE@0 REDUCE@1 TIE NORM UPDATE PUBLISH NORM@1\n"
    program = program_of(text)
    assert [instruction.stage for instruction in program.ranks[0]] == [0, 1, 0, 0, 0, 0, 1]
    assert show(program) == f"schedule: schedule\n{text}"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("rank 0: F0 X0", "line 1: 'X0': unknown word; known: F, B,"),
        ("rank 0: UPDAT", "line 1: 'UPDAT': unknown word (did you mean 'UPDATE'?)"),
        ("rank 0: f0", "line 1: 'f0': unknown word (did you mean 'F'?)"),
        ("rank 0: ?", "line 1: '?': unknown word"),
        ("rank 0: F", "line 1: 'F': F needs the number of a microbatch, like F0"),
        ("rank 0: POP", "line 1: 'POP': POP needs the number of a version, like POP0"),
        ("rank 0: NORM3", "line 1: 'NORM3': NORM takes no number"),
        ("rank 0: PUBLISH<0", "line 1: 'PUBLISH<0': PUBLISH takes no '<'"),
        ("rank 0: TI", "line 1: 'TI': unknown word (did you mean 'TIE'?)"),
        ("rank 0: REDUCE3", "line 1: 'REDUCE3': REDUCE takes no number"),
        ("rank 0: F0<0", "line 1: 'F0<0': F takes no '<'"),
        ("rank 0: SA0<0", "line 1: 'SA0<0': SA needs the other rank, like SA0>1"),
        ("rank 0: SA0>0v1", "line 1: 'SA0>0v1': SA takes no 'v'"),
        ("rank 0: F0v1v1", "line 1: 'F0v1v1': a mark stands twice"),
        ("rank 0: F0@1", "line 1: 'F0@1': there is no stage 1; the stages are 0 … 0"),
        ("rank 0: SA0>7", "line 1: 'SA0>7': there is no rank 7; the ranks are 0 … 0"),
        ("rank 0: F0\n\nrank 0: B0", "line 3: rank 0 is already on line 1; keep one"),
        ("rank 0: F0\nrank 2: F0", "rank 1 missing, though there is a rank 2"),
        ("rank 999999999: F0", "rank 0 missing, though there is a rank 999999999"),
        ("stage 1: 0\nrank 0: F0@1", "stage 0 missing, though there is a stage 1"),
        ("stage 0: 0 3\nrank 0: F0", "line 1: '3': stage 0 must be on ranks that have a line here"),
        ("stage 0: x\nrank 0: F0@0", "line 1: 'x': stage 0 must be on ranks that have a line here"),
        ("stage 0:\nrank 0: F0@0", "line 1: stage 0: name the ranks that hold it"),
        ("stage 0: 0 0\nrank 0: F0", "line 1: stage 0: '0 0' names a rank twice"),
        ("stage 0: 0\nstage 0: 0\nrank 0: F0", "line 2: stage 0 is already on line 1; keep one"),
        (
            "stage 0: 0\nstage 1: 0\nrank 0: F0",
            "line 3: 'F0': which stage? This rank holds several: write F0@0",
        ),
        ("stage 0: 0\nrank 0:\nrank 1: F0", "line 3: 'F0': which stage? This rank holds none: write F0@0"),
        ("rnk 0: F0", "line 1: 'rnk': unknown kind of line (did you mean 'rank'?)"),
        ("rank 0: F0\nF1 B1", "line 2: 'F1 B1': must begin with 'rank N:' or 'stage N:'"),
        ("rank: F0", "line 1: 'rank:' has no number"),
        ("schedule: a\nschedule: b\nrank 0: F0", "line 2: 'schedule' is already on line 1; keep one"),
        ("schedule:\nrank 0: F0", "line 1: 'schedule:': must be written 'schedule: …'"),
        ("microbatches: two\nrank 0: F0", "line 1: 'two': must be an integer number of microbatches"),
        ("rank 0: F" + "9" * 5000, "unknown word"),
        ("# nothing\n", "no rank: write a line for each, like 'rank 0: F0 B0'"),
    ],
)
def test_each_error_names_its_line_and_word(text: str, error: str) -> None:
    parsed = parse(text)
    assert parsed.program is None
    assert len(parsed.errors) == 1
    assert error in parsed.errors[0]


def test_all_errors_at_once_in_the_order_of_the_lines() -> None:
    errors = parse("rank 0: F0 Q1 B\nrank 1: UPDATE1\nrank 1: F0").errors
    assert [error.partition(":")[0] for error in errors] == ["line 1", "line 1", "line 2", "line 3"]


@settings(deadline=None)
@given(st.text(alphabet="rankstge 0123456789:FBIWSARG@v<>#\nUPDATENORMTIEPUBLISH", max_size=80))
def test_no_text_is_a_traceback(text: str) -> None:
    parsed = parse(text)
    assert (parsed.program is None) == bool(parsed.errors)


def test_a_whole_program_is_one_line_per_rank() -> None:
    assert show(build("1f1b", (1, 1), 1)) == (
        "schedule: 1f1b\n"
        "rank 0: F0 SA0>1 RG0<1 B0 REDUCE NORM UPDATE PUBLISH\n"
        "rank 1: RA0<0 F0 B0 SG0>0 REDUCE NORM UPDATE PUBLISH\n"
    )


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
