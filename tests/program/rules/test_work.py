"""Rules of the work: misplaced, duplicate and missing instructions."""

import pytest

from echelon.program import Instruction, Op, Program
from echelon.program.rules import find_errors
from echelon.program.rules.work import find_misplaced
from tests.program.rules.reasons import END, reasons


# One rank with one thing wrong: it needs no sends.
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("F0 F0 B0", "rank 0 at 1: F0 has been done before: keep one"),
        ("F0 B0 B0", "rank 0 at 2: B0 has been done before: keep one"),
        ("F0 B0 I0 W0", "rank 0 at 2: I0 has been done before: keep one"),
        ("F0 I0 W0 W0", "rank 0 at 3: W0 has been done before: keep one"),
        ("B0 F0", "rank 0 at 0: needs F0 before it, which stands behind it"),
        ("F0 W0 I0", "rank 0 at 1: needs I0 before it, which stands behind it"),
        ("F0 F1 B1", "rank 0 at 0: the backward of microbatch 0 at stage 0 is missing"),
        ("F0 I0", "rank 0 at 1: W0 is missing: the gradient of these weights"),
        ("F1 B1", "rank 0: the forward of microbatch 0 at stage 0 is missing"),
    ],
)
def test_errors_of_one_rank(line: str, expected: str) -> None:
    assert expected in reasons(f"rank 0: {line} {END}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rank 0: F0@1\nrank 1:", "rank 0 at 0: stage 1 is not on this rank, but on 1"),
        ("stage 0: 0 1\nrank 0: F1\nrank 1: F0", "rank 0 at 0: microbatch 1 of stage 0 belongs to rank 1"),
        ("microbatches: 1\nrank 0: F1", "rank 0 at 0: there is no microbatch 1 of 1"),
        ("rank 0: F0 SG0>1\nrank 1: F0", "rank 0 at 1: stage 0 is the first: it has no such neighbour"),
        ("rank 0: F0\nrank 1: F0 SA0>0", "rank 1 at 1: stage 1 is the last: it has no such neighbour"),
        (
            "rank 0: F0 SA0>2\nrank 1:\nrank 2:",
            "rank 0 at 1: microbatch 0 of stage 1 is on rank 1: this must go to it",
        ),
        (
            "rank 0:\nrank 1:\nrank 2: RA0<0",
            "rank 2 at 0: microbatch 0 of stage 1 is on rank 1: this must come from it",
        ),
        (
            "stage 0: 0\nstage 1: 0\nrank 0: F0@0 SA0@0>0",
            "rank 0 at 1: stage 1 is on this rank too: nothing is sent",
        ),
    ],
)
def test_instructions_that_a_rank_cannot_have(text: str, expected: str) -> None:
    errors = reasons(text, find_misplaced)
    assert any(error.startswith(expected) for error in errors), errors
    assert reasons(text) == errors  # the other rules assume that there are none


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        (Instruction(Op.FORWARD), "has no microbatch"),
        (Instruction(Op.SEND_ACTIVATION, 0, 0), "has no other rank"),
        (Instruction(Op.FORWARD, 0, 0, peer=1), "is no transfer, but names rank 1"),
        (Instruction(Op.STASH), "has no version"),
        (Instruction(Op.FORWARD, 9, 0), "there is no stage 9 of 1"),
        (Instruction(Op.FORWARD, -1, 0), "there is no stage -1 of 1"),
    ],
)
def test_instructions_that_no_text_can_give(instruction: Instruction, expected: str) -> None:
    program = Program("odd", ((0,),), 1, ((instruction,),))
    assert [error.reason for error in find_errors(program)] == [expected]


def test_a_placement_on_ranks_that_do_not_exist() -> None:
    (error,) = find_errors(Program("odd", ((0,), (3,)), 1, ((),)))
    assert error.reason == "stage 1 is on ranks [3], but the ranks are 0 … 0"
