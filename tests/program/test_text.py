"""Programs print and parse to themselves: golden files, and all errors with their lines."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.program import Instruction, Op, Program, add_gathers, build, parse, show
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
