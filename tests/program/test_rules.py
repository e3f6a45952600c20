"""Rules of a program find what is misplaced, missing, unmatched or stuck."""

import pytest

from echelon.program import Instruction, Op, Program, add_copies, build
from echelon.program.check import find_errors
from echelon.program.rules import (
    ProgramError,
    find_copy_errors,
    find_deadlocks,
    find_misplaced,
    find_unmatched_transfers,
    word,
)
from tests.program.cases import program_of, with_rank
from tests.program.reasons import END, reasons

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


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        ("F0 S0 B0", "what its forward saved is in host memory: put T0 before it"),
        ("F0 S0 I0 W0", "what its forward saved is in host memory: put T0 before it"),
        ("F0 S0 T0 I0 W0", "what its forward saved is in host memory: put T0 before it"),
        ("F0 S0 T0 I0 T0 T0 W0", "T0 has been done before: keep one"),
        ("F0 S0 T0 I0 T0 W0 T0", "its backward stands before it: nothing is left to copy"),
        ("F0 I0 S0 T0 W0", "its backward stands before it: nothing is left to copy"),
        ("F0 S0 F1 B1", "is never fetched: put its T before the backward"),
        ("F0 T0 B0", "needs S0 before it"),
        ("S0 F0 T0 B0", "needs F0 before it"),
        ("F0 S0 B0 T0", "its backward stands before it: nothing is left to copy"),
        ("F0 S0 S0 T0 B0", "S0 has been done before: keep one"),
        ("F0 S0 T0 T0 B0", "T0 has been done before: keep one"),
    ],
)
def test_errors(work: str, reason: str) -> None:
    errors = find_errors(program_of(f"rank 0: {work} {END}"))
    assert any(reason in error.reason for error in errors), [error.reason for error in errors]


def test_an_error_is_reported_where_it_is_and_once() -> None:
    def found(work: str) -> list[tuple[int | None, str]]:
        errors = find_copy_errors(program_of(f"rank 0: {work} {END}"))
        return [(error.index, error.reason.partition(":")[0]) for error in errors]

    missing, late, never = (
        "what its forward saved is in host memory",
        "its backward stands before it",
        "is never fetched",
    )
    assert found("F0 S0 I0 W0") == [(2, missing), (3, missing)]
    assert found("F0 S0 B0 B0") == [(2, missing)]
    assert found("F0 S0 B0 T0") == [(2, missing), (3, late)]
    assert found("F0 I0 S0 W0") == [(2, late)], "what was not copied need not come back"
    assert found("F0 F1 S0 S1 T1 B1") == [(2, never)]
    assert found("F0 S0 T0 I0 T0 W0") == found("F0 I0 W0 F1 S1 T1 B1") == []


def test_each_part_of_a_backward_has_a_fetch() -> None:
    assert find_errors(program_of(f"rank 0: F0 S0 T0 I0 T0 W0 {END}")) == []
    (error,) = find_errors(program_of(f"rank 0: F0 S0 T0 I0 {END}"))
    assert "W0 is missing" in error.reason


def test_a_microbatch_may_stay() -> None:
    assert find_errors(program_of(f"rank 0: F0 S0 F1 B1 T0 B0 {END}")) == []


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble", "pipedream"])
def test_every_schedule_with_copies_passes(name: str) -> None:
    program = build(name, (1, 1), 4, copies=True)
    assert find_errors(program) == []
    assert program == add_copies(build(name, (1, 1), 4))


def test_a_send_without_a_receive_and_the_reverse() -> None:
    text = "rank 0: F0 SA0>1 F1\nrank 1: RA1<0 F1"
    assert reasons(text, find_unmatched_transfers) == [
        "rank 0 at 1: rank 1 never receives it: it has no RA0<0",
        "rank 1 at 0: rank 0 never sends it: it has no SA1>1",
    ]


def test_receives_in_another_order_than_the_sends() -> None:
    text = "rank 0: F0 SA0>1 F1 SA1>1\nrank 1: RA1<0 RA0<0"
    assert reasons(text, find_unmatched_transfers) == [
        "rank 1 at 0: receives the wrong message: message 1 from rank 0 is that of SA0>1; "
        "receive in the order of the sends"
    ]


def test_a_deadlock_names_who_waits_for_what() -> None:
    # Each rank wants the other's next message before it sends its own.
    text = f"""
    rank 0: F0 SA0>1 RG0<1 B0 F1 SA1>1 RG1<1 B1 {END}
    rank 1: RA0<0 RA1<0 F0 B0 SG0>0 F1 B1 SG1>0 {END}
    """
    assert reasons(text) == [
        "rank 0 at 2: deadlock: waits for SG0>0; rank 1 waits at RA1<0",
        "rank 1 at 1: deadlock: waits for SA1>1; rank 0 waits at RG0<1",
    ]


def test_replicas_that_reduce_two_stages_in_different_orders_deadlock() -> None:
    text = """
    stage 0: 0 1
    stage 1: 0 1
    rank 0: F0@0 F0@1 B0@1 B0@0 REDUCE@0 REDUCE@1 NORM UPDATE PUBLISH
    rank 1: F1@0 F1@1 B1@1 B1@0 REDUCE@1 REDUCE@0 NORM UPDATE PUBLISH
    """
    assert reasons(text) == [
        "rank 0 at 4: deadlock: waits for REDUCE of stage 0; rank 1 waits at REDUCE@1",
        "rank 1 at 4: deadlock: waits for REDUCE of stage 1; rank 0 waits at REDUCE@0",
    ]
    surplus = text.replace("REDUCE@1 REDUCE@0", "REDUCE@0 REDUCE@1").replace(
        "B0@0 REDUCE@0 REDUCE@1", "B0@0 REDUCE@0 REDUCE@1 REDUCE@1"
    )
    assert reasons(surplus) == [
        "rank 0 at 6: deadlock: waits for REDUCE of stage 1; rank 1 waits at NORM",
        "rank 1 at 6: deadlock: waits for NORM of every rank; rank 0 waits at REDUCE@1",
    ]


def test_a_deadlock_with_a_rank_that_has_ended() -> None:
    text = f"stage 0: 0 1\nrank 0: F0 B0 {END} {END}\nrank 1: F1 B1 {END}"
    assert reasons(text) == ["rank 0 at 6: deadlock: waits for REDUCE of stage 0; rank 1 has ended"]


def test_a_tie_that_not_every_rank_has() -> None:
    text = f"""
    rank 0: F0 SA0>1 RG0<1 B0 REDUCE TIE NORM UPDATE PUBLISH
    rank 1: RA0<0 F0 B0 SG0>0 {END}
    """
    assert reasons(text) == [
        "rank 0 at 5: deadlock: waits for TIE of every rank; rank 1 waits at NORM",
        "rank 1 at 5: deadlock: waits for NORM of every rank; rank 0 waits at TIE",
    ]


def test_a_rank_without_a_stage_takes_no_part_in_the_norm() -> None:
    assert reasons(f"stage 0: 0\nrank 0: F0 B0 {END} F1 B1 {END}\nrank 1:") == []


def test_of_many_ranks_that_wait_some_are_named() -> None:
    program = build("gpipe", (1,) * 8, 1)
    tie = [Instruction(Op.TIE) if one.op is Op.NORM else one for one in program.ranks[0]]
    _, of_rank_1, *_ = find_deadlocks(with_rank(program, 0, tie))
    assert of_rank_1.reason == (
        "deadlock: waits for NORM of every rank; rank 0 waits at TIE, rank 2 waits at NORM, rank 3 waits at "
        "NORM, rank 4 waits at NORM, rank 5 waits at NORM, and 2 more"
    )
