"""The sentence of an error: the line, the rank, the instruction as it is written there, the reason."""

import pytest

from echelon.program.rules import ProgramError
from echelon.program.rules.error import word
from tests.program.cases import program_of

PROGRAM = program_of("stage 0: 0\nstage 1: 0\nstage 2: 1\nrank 0: F0@1 NORM\nrank 1: RA0<0")


@pytest.mark.parametrize(
    ("error", "lines", "sentence"),
    [
        (ProgramError(0, 0, "is wrong"), {}, "rank 0, F0@1: is wrong"),
        (ProgramError(0, 1, "is wrong"), {1: 9}, "rank 0, NORM: is wrong"),
        (ProgramError(1, 0, "is wrong"), {0: 4, 1: 5}, "line 5, rank 1, RA0<0: is wrong"),
        (ProgramError(1, None, "F0 is missing"), {0: 4, 1: 5}, "line 5, rank 1: F0 is missing"),
    ],
)
def test_the_sentence_names_the_place_and_the_reason(
    error: ProgramError, lines: dict[int, int], sentence: str
) -> None:
    assert error.sentence(PROGRAM, lines) == sentence


def test_an_instruction_is_written_as_on_the_line_of_its_rank() -> None:
    assert word(PROGRAM, 0, PROGRAM.ranks[0][0]) == "F0@1"
    assert word(PROGRAM, 1, PROGRAM.ranks[1][0]) == "RA0<0"
    assert word(PROGRAM, 0, PROGRAM.ranks[1][0]) == "RA0@2<0"
