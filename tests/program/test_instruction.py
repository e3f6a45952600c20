"""Instructions and programs as data: who holds what, and what a program contains."""

import pytest

from echelon.program import RANK_LEVEL, RECEIVES, SENDS, Op, Program, build
from echelon.program.instruction import COMPUTE, COPIES
from tests.program.cases import program_of


def test_replicas_take_microbatches_in_turn() -> None:
    program = Program("p", ((0, 1), (2, 3, 4)), 6, ((),) * 5)
    assert [program.holder(0, k) for k in range(4)] == [0, 1, 0, 1]
    assert [program.holder(1, k) for k in range(4)] == [2, 3, 4, 2]
    assert program.stages == 2
    assert program.round == 6  # who works on what repeats after the least common multiple of 2 and 3


def test_a_rank_holds_stages_in_the_order_of_the_model() -> None:
    program = Program("p", ((1,), (0,), (1,)), 1, ((), (), ()))
    assert [program.stages_of(rank) for rank in range(4)] == [(1,), (0, 2), (), ()]


def test_backwards_in_two_parts_are_recognised() -> None:
    assert program_of("rank 0: F0 I0 W0").halves
    assert not program_of("rank 0: F0 B0").halves


def test_any_named_version_makes_a_program_versioned() -> None:
    assert not program_of("rank 0: F0 B0 REDUCE NORM UPDATE PUBLISH").versioned
    assert program_of("rank 0: F0\nrank 1: F0v0").versioned
    assert program_of("rank 0: STASH0").versioned


def test_every_operation_is_of_one_kind() -> None:
    rest = {Op.GATHER, Op.FREE, Op.REDUCE, Op.STASH, Op.POP}
    kinds = [COMPUTE, COPIES, SENDS, RECEIVES, RANK_LEVEL, rest]
    assert frozenset().union(*kinds) == frozenset(Op)
    assert sum(map(len, kinds)) == len(Op)


def test_pairs_are_all_that_ever_exchange_a_message() -> None:
    program = build("1f1b", (3, 2), microbatches=1)
    assert (program.placement[0], program.placement[1]) == ((0, 1, 2), (3, 4))
    forward = {(first, second) for first in (0, 1, 2) for second in (3, 4)}
    assert program.pairs == forward | {(b, a) for a, b in forward}
    assert build("gpipe", (1, 1, 1), microbatches=2).pairs == {(0, 1), (1, 0), (1, 2), (2, 1)}
    ring = build("interleaved", (1, 1, 1), microbatches=3, chunks=2)
    assert (2, 0) in ring.pairs, "the last rank of the first round passes on to the first"
    assert build("gpipe", (1,), microbatches=2).pairs == frozenset()


@pytest.mark.parametrize(
    ("schedule", "microbatches", "is_first"),
    [
        ("gpipe", 4, True),
        ("1f1b", 1, True),
        ("1f1b", 2, False),  # the first stage runs all its forwards first, the last one does not
        ("naive", 2, False),
        ("zero-bubble", 4, False),
    ],
)
def test_forwards_come_first_where_no_rank_turns_back(
    schedule: str, microbatches: int, is_first: bool
) -> None:
    assert build(schedule, (1, 1), microbatches).forwards_first == is_first
