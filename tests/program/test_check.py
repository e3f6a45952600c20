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
from echelon.program.check import find_errors
from echelon.program.instruction import COMPUTE, RANK_LEVEL, RECEIVES, SENDS
from tests.program.cases import Shape, program_of, programs, shapes, with_rank


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
