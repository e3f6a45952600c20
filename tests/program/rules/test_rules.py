"""All rules together: any schedule with one thing wrong has an error."""

import random
from dataclasses import replace
from itertools import pairwise

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echelon.plan import ASYNCHRONOUS_SCHEDULES
from echelon.program import Instruction, Op, Program, add_gathers, build
from echelon.program.instruction import COMPUTE, RANK_LEVEL, RECEIVES, SENDS
from echelon.program.rules import find_errors
from tests.program.cases import Shape, program_of, shapes, with_rank


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
