"""The check raises one error with every reason, and shows the marked grid."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echelon.errors import UserError
from echelon.plan import ASYNCHRONOUS_SCHEDULES
from echelon.program import Instruction, Op, Program, add_gathers, build, check, complete
from echelon.program.check import find_errors, find_gather_errors, find_update_errors, find_version_errors
from echelon.program.instruction import COMPUTE, RANK_LEVEL, RECEIVES, SENDS
from tests.program.cases import Shape, program_of, programs, shapes, with_rank
from tests.program.reasons import END, reasons


def test_the_message_has_the_grid_the_instructions_and_the_reasons() -> None:
    program = build("1f1b", (1, 1), 2)
    dropped = next(one for one in program.ranks[0] if one.op is Op.SEND_ACTIVATION)
    invalid = with_rank(program, 0, [one for one in program.ranks[0] if one != dropped])
    with pytest.raises(UserError) as caught:
        check(invalid, lines={0: 4, 1: 5})
    assert str(caught.value) == (
        "1 error in schedule '1f1b', marked [ ] in the grid:\n\n"
        "time    0     1     2     3     4     5     6\n"
        "rank 0  F0    F1    ·     ·     ·     B0    B1\n"
        "rank 1  ·     ·     [RA0] F0    B0    F1    B1\n"
        "\n  - line 5, rank 1, RA0<0: rank 0 never sends it: it has no SA0>1"
    )


def test_an_error_of_the_update_is_marked_in_the_grid() -> None:
    with pytest.raises(UserError) as caught:
        check(program_of("rank 0: F0 B0 REDUCE UPDATE PUBLISH"))
    assert str(caught.value) == (
        "1 error in schedule 'schedule', marked [ ] in the grid:\n\n"
        "time    0   1   2\n"
        "rank 0  F0  B0  [U]\n"
        "\n  - rank 0, UPDATE: no NORM before it: put one between the last REDUCE and the UPDATE"
    )


def test_of_many_ranks_and_a_long_time_the_neighbourhood_is_shown() -> None:
    program = build("1f1b", (1,) * 40, 60)
    work = [one for one in program.ranks[20] if one[:3] != (Op.BACKWARD, 20, 50)]
    with pytest.raises(UserError) as caught:
        check(with_rank(program, 20, work))
    grid = caught.value.title.splitlines()
    rows = [line[:8].strip() for line in grid if line.startswith("rank")]
    assert rows[:3] == ["rank 19", "rank 20", "rank 21"]
    assert len(grid) < 30
    assert max(map(len, grid)) <= 100
    assert "[F50]" in caught.value.title


def test_a_valid_program_passes() -> None:
    check(build("zero-bubble", (2, 1, 3), 7))
    with pytest.raises(UserError, match="the backward of microbatch 0"):
        check(program_of("rank 0: F0 REDUCE NORM UPDATE PUBLISH"))
    check(program_of("rank 0: F0"), training=False)


@settings(deadline=None)
@given(programs(), st.booleans(), st.booleans())
def test_no_program_is_a_traceback(program: Program, training: bool, ties: bool) -> None:
    """Whatever can be written passes, or is rejected with sentences and a grid."""
    try:
        check(complete(program, ties=ties), training=training)
    except UserError as error:
        assert error.errors
        assert "time" in error.title


def test_not_more_than_a_thousand_errors_are_reported() -> None:
    program = build("gpipe", (1,), 2000)
    with pytest.raises(UserError) as caught:
        check(replace(program, ranks=(program.ranks[0] * 2,)))
    assert caught.value.errors[-1] == "and 7000 more"


def positions(program: Program, ops: frozenset[Op]) -> list[tuple[int, int]]:
    """Rank and index of every instruction of these kinds."""
    return [
        (rank, index)
        for rank, instructions in enumerate(program.ranks)
        for index, instruction in enumerate(instructions)
        if instruction.op in ops
    ]


@settings(deadline=None)
@given(shapes(), st.randoms(use_true_random=False))
def test_a_dropped_instruction_is_found_whatever_it_is(shape: Shape, chance: random.Random) -> None:
    program = add_gathers(shape.program()) if chance.random() < 0.3 else shape.program()
    rank, index = chance.choice(positions(program, frozenset(Op) - {Op.REDUCE}))
    work = program.ranks[rank]
    assert find_errors(with_rank(program, rank, [*work[:index], *work[index + 1 :]])), (rank, work[index])


@settings(deadline=None)
@given(shapes(), st.randoms(use_true_random=False))
def test_a_dropped_reduce_is_found(shape: Shape, chance: random.Random) -> None:
    program = shape.program()
    rank, index = chance.choice(positions(program, frozenset({Op.REDUCE})))
    # A lone replica without a microbatch has no gradient that could be lost.
    assume(any(instruction.op in COMPUTE for instruction in program.ranks[rank]))
    work = program.ranks[rank]
    assert find_errors(with_rank(program, rank, [*work[:index], *work[index + 1 :]]))


@settings(deadline=None)
@given(shapes(), st.randoms(use_true_random=False))
def test_an_instruction_that_stands_twice_is_found(shape: Shape, chance: random.Random) -> None:
    program = shape.program()
    ops = COMPUTE | SENDS | RECEIVES | {Op.STASH, Op.POP, Op.NORM, Op.PUBLISH}
    rank, index = chance.choice(positions(program, ops))
    work = program.ranks[rank]
    assert find_errors(with_rank(program, rank, [*work[: index + 1], *work[index:]]))


@settings(deadline=None)
@given(shapes(), st.randoms(use_true_random=False))
def test_two_instructions_of_an_update_that_change_places_are_found(
    shape: Shape, chance: random.Random
) -> None:
    program = shape.program()
    ends = RANK_LEVEL | {Op.REDUCE}
    pairs = [
        (rank, index)
        for rank, index in positions(program, ends)
        if index and program.ranks[rank][index - 1].op in ends - {program.ranks[rank][index].op}
    ]
    rank, index = chance.choice(pairs)
    work = [*program.ranks[rank]]
    work[index - 1], work[index] = work[index], work[index - 1]
    assume(work[index - 1 : index + 1] != [*program.ranks[rank][index - 1 : index + 1]])
    assert find_errors(with_rank(program, rank, work))


@settings(deadline=None)
@given(shapes(most_replicas=1), st.randoms(use_true_random=False))
def test_two_receives_of_one_channel_that_change_places_are_found(
    shape: Shape, chance: random.Random
) -> None:
    program = shape.program()
    pairs = [
        (rank, one, other)
        for rank, work in enumerate(program.ranks)
        for one, other in _pairs_of_receives(work)
    ]
    assume(pairs)
    rank, one, other = chance.choice(pairs)
    work = [*program.ranks[rank]]
    work[one], work[other] = work[other], work[one]
    errors = find_errors(with_rank(program, rank, work))
    assert any("receives the wrong message" in error.reason for error in errors)


def _pairs_of_receives(work: tuple[Instruction, ...]) -> list[tuple[int, int]]:
    by_peer: dict[int | None, list[int]] = {}
    for index, instruction in enumerate(work):
        if instruction.op in RECEIVES:
            by_peer.setdefault(instruction.peer, []).append(index)
    return [pair for indexes in by_peer.values() for pair in pairwise(indexes)]


@settings(deadline=None)
@given(shapes(names=ASYNCHRONOUS_SCHEDULES), st.randoms(use_true_random=False))
def test_a_backward_with_another_version_is_found(shape: Shape, chance: random.Random) -> None:
    program = shape.program()
    rank, index = chance.choice(positions(program, frozenset({Op.BACKWARD})))
    work = [*program.ranks[rank]]
    version = work[index].version
    assert version is not None
    work[index] = work[index]._replace(version=version + chance.choice([-1, 1]))
    assert any("used version" in error.reason for error in find_errors(with_rank(program, rank, work)))


@settings(deadline=None)
@given(shapes(names=ASYNCHRONOUS_SCHEDULES))
def test_a_version_that_is_popped_too_early_is_found(shape: Shape) -> None:
    program = shape.program()
    pops = positions(program, frozenset({Op.POP}))
    assume(pops)
    rank, index = pops[0]
    work = [*program.ranks[rank]]
    work[index - 1 : index + 1] = [work[index], work[index - 1]]
    assume(work[index].op is Op.BACKWARD)
    assert any("is gone" in error.reason for error in find_errors(with_rank(program, rank, work)))


def test_many_missing_computations_are_counted_not_listed() -> None:
    program = replace(build("1f1b", (1, 1), 2), microbatches=1_000_000_000)
    reasons = [error.reason for error in find_errors(program)]
    assert len(reasons) == 4 * 5
    assert any("and 999999993 more" in reason for reason in reasons)


def test_without_training_forwards_suffice() -> None:
    forwards = program_of("rank 0: F0 F1")
    assert find_errors(forwards, training=False) == []
    assert find_errors(forwards)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"F0v1 B0v1 {END}", "rank 0 at 0: version 1 does not exist yet: the newest is version 0"),
        (f"F0v0 B0v0 {END} F1v0 B1v0 {END}", "rank 0 at 6: version 0 is gone: it was not stashed"),
        (f"F0 F1 B0 {END} B1 {END}", "rank 0 at 7: uses version 1, but its forward used version 0"),
        (
            f"F0 F1v0 B0 REDUCE NORM STASH0 UPDATE PUBLISH POP0 B1v0 {END}",
            "rank 0 at 9: version 0 is gone: it was not stashed, or has been popped",
        ),
        (
            "F0 B0 REDUCE NORM STASH0 UPDATE PUBLISH",
            "rank 0: version 0 of stage 0 is stashed and never popped",
        ),
        (f"STASH1 F0 B0 {END} POP1", "rank 0 at 0: cannot stash version 1: the newest is version 0"),
        (f"STASH0 STASH0 F0 B0 {END} POP0", "rank 0 at 1: cannot stash version 0: it is stashed already"),
        (f"F0 B0 POP0 {END}", "rank 0 at 2: version 0 is not stashed"),
    ],
)
def test_versions_that_are_not_there(line: str, expected: str) -> None:
    errors = reasons(f"rank 0: {line}", find_version_errors)
    assert any(error.startswith(expected) for error in errors), errors


@pytest.mark.parametrize(
    "line",
    [
        f"F0 B0 {END} F1 B1 {END}",
        f"F0v0 F1v0 B0v0 REDUCE NORM STASH0 UPDATE PUBLISH B1v0 POP0 {END}",
    ],
)
def test_versions_that_exist_are_accepted(line: str) -> None:
    assert reasons(f"rank 0: {line}", find_version_errors) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("GATHER F0 FREE B0", "rank 0 at 3: uses the weights of stage 0, which are not gathered"),
        ("GATHER F0 GATHER B0 FREE", "rank 0 at 2: the weights of stage 0 are gathered already"),
        ("GATHER F0 B0 FREE FREE", "rank 0 at 4: the weights of stage 0 are not gathered: nothing to free"),
        ("GATHER F0 B0", "rank 0 at 0: the weights of stage 0 are gathered and never freed"),
    ],
)
def test_gathers_without_a_partner(line: str, expected: str) -> None:
    assert expected in reasons(f"rank 0: {line} {END}", find_gather_errors)


def test_a_program_without_any_gather_needs_none() -> None:
    assert reasons(f"rank 0: F0 B0 {END}", find_gather_errors) == []
    assert reasons("rank 0: F0\nrank 1: GATHER F0 FREE", find_gather_errors) == [
        "rank 0 at 0: uses the weights of stage 0, which are not gathered"
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("F0 B0 UPDATE PUBLISH", "at 1: no REDUCE of stage 0 between this and the UPDATE"),
        ("F0 I0 W0 NORM UPDATE PUBLISH", "at 2: no REDUCE of stage 0 between this and the UPDATE"),
        ("F0 B0 REDUCE", "at 2: no UPDATE behind it: its gradient would be lost"),
        ("F0 B0", "at 1: no UPDATE behind it: its gradient would be lost"),
        (
            "F0 B0 REDUCE UPDATE PUBLISH",
            "at 3: no NORM before it: put one between the last REDUCE and the UPDATE",
        ),
        (
            "F0 B0 NORM REDUCE UPDATE PUBLISH",
            "at 2: a REDUCE of the same UPDATE stands behind it: put NORM behind the last REDUCE",
        ),
        ("F0 B0 REDUCE NORM NORM UPDATE PUBLISH", "at 4: a second NORM before one UPDATE: keep one"),
        ("F0 B0 REDUCE NORM UPDATE NORM PUBLISH", "at 5: no UPDATE behind it: nothing would use its result"),
        (
            "F0 B0 TIE REDUCE NORM UPDATE PUBLISH",
            "at 2: a REDUCE of the same UPDATE stands behind it: put TIE behind the last REDUCE",
        ),
        (
            "F0 B0 REDUCE NORM TIE UPDATE PUBLISH",
            "at 4: the NORM of the same UPDATE stands before it: put TIE between REDUCE and NORM",
        ),
        ("F0 B0 REDUCE NORM UPDATE TIE PUBLISH", "at 5: no UPDATE behind it: nothing would use its result"),
        ("F0 B0 REDUCE NORM UPDATE", "at 4: no PUBLISH behind it: replicas would keep the old weights"),
        (
            "PUBLISH F0 B0 REDUCE NORM UPDATE PUBLISH",
            "at 0: no UPDATE before it: there are no new weights to publish",
        ),
        (
            "F0 B0 REDUCE NORM UPDATE PUBLISH PUBLISH",
            "at 6: no UPDATE before it: there are no new weights to publish",
        ),
        (
            "F0 B0 REDUCE NORM UPDATE F1 B1 REDUCE NORM UPDATE PUBLISH",
            "at 4: no PUBLISH between this and the next computation: replicas would use old weights",
        ),
        (
            "F0 B0 REDUCE NORM UPDATE F1 PUBLISH B1 REDUCE NORM UPDATE PUBLISH",
            "at 4: no PUBLISH between this and the next computation: replicas would use old weights",
        ),
    ],
)
def test_each_wrong_order_is_reported(line: str, expected: str) -> None:
    assert f"rank 0 {expected}" in reasons(f"rank 0: {line}", find_update_errors)


@pytest.mark.parametrize(
    "line",
    [
        "F0 B0 REDUCE NORM UPDATE PUBLISH",
        "F0 B0 REDUCE TIE NORM UPDATE PUBLISH",
        "F0 B0 REDUCE F1 B1 REDUCE NORM UPDATE PUBLISH",
        "F0 B0 REDUCE NORM UPDATE PUBLISH F1 B1 REDUCE NORM UPDATE PUBLISH",
        "F0v0 B0v0 REDUCE NORM STASH0 UPDATE POP0 PUBLISH",
        "REDUCE NORM UPDATE PUBLISH",
        "",
    ],
)
def test_right_orders_are_accepted(line: str) -> None:
    assert reasons(f"rank 0: {line}", find_update_errors) == []


def test_each_stage_of_a_rank_is_reduced() -> None:
    text = "stage 0: 0\nstage 1: 0\nrank 0: F0@0 F0@1 B0@1 B0@0 REDUCE@0 NORM UPDATE PUBLISH"
    assert reasons(text, find_update_errors) == [
        "rank 0 at 2: no REDUCE of stage 1 between this and the UPDATE"
    ]
