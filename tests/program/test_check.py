"""The check finds what is planted, names it, and shows it in the grid."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echelon.errors import UserError
from echelon.program import Instruction, Op, Program, add_gathers, build, check
from echelon.program.instruction import COMPUTE, RECEIVES, SENDS
from echelon.program.load import complete
from echelon.program.rules import find
from echelon.program.rules.transfers import never_stuck
from tests.program.cases import Shape, program_of, programs, shapes, with_rank


def reasons(text: str) -> list[str]:
    program = program_of(text)
    names = []
    for error in find(program):
        at = "" if error.place is None else f" at {error.place}"
        names.append(f"rank {error.rank}{at}: {error.reason}")
    return names


END = "REDUCE NORM UPDATE PUBLISH"


# One rank with one thing wrong: it needs no sends.
@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"rank 0: F0 F0 B0 {END}", "rank 0 at 1: F0 has been done before"),
        (f"rank 0: F0 B0 B0 {END}", "rank 0 at 2: B0 has been done before"),
        (f"rank 0: F0 B0 I0 W0 {END}", "rank 0 at 2: I0 has been done before"),
        (f"rank 0: F0 I0 W0 W0 {END}", "rank 0 at 3: W0 has been done before"),
        (f"rank 0: B0 F0 {END}", "rank 0 at 0: needs F0 before it, which stands behind it"),
        (f"rank 0: F0 W0 I0 {END}", "rank 0 at 1: needs I0 before it, which stands behind it"),
        (f"rank 0: F0 F1 B1 {END}", "rank 0 at 0: the backward of microbatch 0 at stage 0 is missing"),
        (f"rank 0: F0 I0 {END}", "rank 0 at 1: W0 is missing"),
        (f"rank 0: F1 B1 {END}", "rank 0: the forward of microbatch 0 at stage 0 is missing"),
        ("rank 0: F0 B0 UPDATE", "rank 0 at 1: no REDUCE of stage 0 between this and the UPDATE"),
        ("rank 0: F0 B0 REDUCE", "rank 0 at 2: no UPDATE behind it"),
        ("rank 0: F0 B0", "rank 0 at 1: no UPDATE behind it"),
        ("rank 0: F0 B0 REDUCE UPDATE PUBLISH", "rank 0 at 3: no NORM before it"),
        (
            "rank 0: F0 B0 NORM REDUCE UPDATE PUBLISH",
            "rank 0 at 2: a REDUCE of the same UPDATE stands behind it: put NORM",
        ),
        ("rank 0: F0 B0 REDUCE NORM NORM UPDATE PUBLISH", "rank 0 at 4: a second NORM before one UPDATE"),
        (
            "rank 0: F0 B0 REDUCE UPDATE NORM PUBLISH",
            "rank 0 at 4: no UPDATE behind it: nothing would use its result",
        ),
        (f"rank 0: F0 B0 TIE {END}", "rank 0 at 2: a REDUCE of the same UPDATE stands behind it: put TIE"),
        (
            "rank 0: F0 B0 REDUCE NORM TIE UPDATE PUBLISH",
            "rank 0 at 4: the NORM of the same UPDATE stands before it: put TIE",
        ),
        (
            "rank 0: F0 B0 REDUCE NORM UPDATE TIE PUBLISH",
            "rank 0 at 5: no UPDATE behind it: nothing would use its result",
        ),
        ("rank 0: F0 B0 REDUCE NORM UPDATE", "rank 0 at 4: no PUBLISH behind it"),
        (
            "rank 0: F0 B0 REDUCE NORM PUBLISH UPDATE",
            "rank 0 at 4: no UPDATE before it: there are no new weights",
        ),
        (
            f"rank 0: F0 B0 REDUCE NORM UPDATE F1 B1 {END}",
            "rank 0 at 4: no PUBLISH between this and the next",
        ),
        (f"rank 0: F0v1 B0v1 {END}", "rank 0 at 0: version 1 does not exist yet"),
        (f"rank 0: F0v0 B0v0 {END} F1v0 B1v0 {END}", "rank 0 at 6: version 0 is gone"),
        (f"rank 0: F0 F1 B0 {END} B1 {END}", "rank 0 at 7: uses version 1, but its forward"),
        (
            f"rank 0: F0 F1v0 B0 REDUCE NORM STASH0 UPDATE PUBLISH POP0 B1v0 {END}",
            "rank 0 at 9: version 0 is gone",
        ),
        (
            "rank 0: F0 B0 REDUCE NORM STASH0 UPDATE PUBLISH",
            "rank 0: version 0 of stage 0 is stashed and never popped",
        ),
        (f"rank 0: STASH1 F0 B0 {END} POP1", "rank 0 at 0: cannot stash version 1: the weights of"),
        (f"rank 0: STASH0 STASH0 F0 B0 {END} POP0", "rank 0 at 1: cannot stash version 0: it is"),
        (f"rank 0: F0 B0 POP0 {END}", "rank 0 at 2: version 0 is not stashed"),
        (f"rank 0: GATHER F0 FREE B0 {END}", "rank 0 at 3: uses the weights of stage 0, which"),
        (f"rank 0: GATHER F0 GATHER B0 FREE {END}", "rank 0 at 2: the weights of stage 0 are"),
        (f"rank 0: GATHER F0 B0 FREE FREE {END}", "rank 0 at 4: the weights of stage 0 are not"),
        (f"rank 0: GATHER F0 B0 {END}", "rank 0 at 0: the weights of stage 0 are gathered and"),
    ],
)
def test_errors_of_one_rank(text: str, error: str) -> None:
    assert any(told.startswith(error) for told in reasons(text)), reasons(text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("rank 0: F0@1\nrank 1:", "rank 0 at 0: stage 1 is not on this rank, but on 1"),
        ("stage 0: 0 1\nrank 0: F1\nrank 1: F0", "rank 0 at 0: microbatch 1 of stage 0 is that of rank 1"),
        ("microbatches: 1\nrank 0: F1", "rank 0 at 0: there is no microbatch 1 of 1"),
        ("rank 0: F0 SG0>1\nrank 1: F0", "rank 0 at 1: stage 0 is the first: it has no such neighbour"),
        ("rank 0: F0\nrank 1: F0 SA0>0", "rank 1 at 1: stage 1 is the last: it has no such neighbour"),
        ("rank 0: F0 SA0>2\nrank 1:\nrank 2:", "rank 0 at 1: microbatch 0 of stage 1 is on rank 1: this"),
        ("rank 0:\nrank 1:\nrank 2: RA0<0", "rank 2 at 0: microbatch 0 of stage 1 is on rank 1: this"),
        ("stage 0: 0\nstage 1: 0\nrank 0: F0@0 SA0@0>0", "rank 0 at 1: stage 1 is on this rank too"),
    ],
)  # fmt: skip
def test_instructions_that_a_rank_cannot_have(text: str, error: str) -> None:
    assert any(told.startswith(error) for told in reasons(text)), reasons(text)


@pytest.mark.parametrize(
    ("its", "error"),
    [
        (Instruction(Op.FORWARD), "has no microbatch"),
        (Instruction(Op.SEND_ACTIVATION, 0, 0), "has no other rank"),
        (Instruction(Op.STASH), "has no version"),
        (Instruction(Op.FORWARD, 9, 0), "there is no stage 9 of 1"),
        (Instruction(Op.FORWARD, -1, 0), "there is no stage -1 of 1"),
    ],
)
def test_instructions_that_no_text_can_give(its: Instruction, error: str) -> None:
    with pytest.raises(UserError, match=error):
        check(Program("odd", ((0,),), 1, ((its,),)))


def test_a_placement_on_ranks_that_are_not_there() -> None:
    with pytest.raises(UserError, match=r"stage 1 is on ranks \[3\], of 1 that there are"):
        check(Program("odd", ((0,), (3,)), 1, ((),)))


def test_a_deadlock_names_who_waits_for_what() -> None:
    # Each rank wants the other's next message before it sends its own.
    text = """
    rank 0: F0 SA0>1 RG0<1 B0 F1 SA1>1 RG1<1 B1 REDUCE NORM UPDATE PUBLISH
    rank 1: RA0<0 RA1<0 F0 B0 SG0>0 F1 B1 SG1>0 REDUCE NORM UPDATE PUBLISH
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
    ended = text.replace("REDUCE@1 REDUCE@0", "REDUCE@0 REDUCE@1").replace(
        "B0@0 REDUCE@0 REDUCE@1", "B0@0 REDUCE@0 REDUCE@1 REDUCE@1"
    )
    assert reasons(ended) == [
        "rank 0 at 6: deadlock: waits for REDUCE of stage 1; rank 1 waits at NORM",
        "rank 1 at 6: deadlock: waits for NORM of every rank; rank 0 waits at REDUCE@1",
    ]


def test_a_rank_that_waits_for_one_that_has_come_to_its_end() -> None:
    text = """
    rank 0: F0 SA0>1 RG0<1 B0 REDUCE TIE NORM UPDATE PUBLISH
    rank 1: RA0<0 F0 B0 SG0>0 REDUCE NORM UPDATE PUBLISH
    """
    assert reasons(text) == [
        "rank 0 at 5: deadlock: waits for TIE of every rank; rank 1 waits at NORM",
        "rank 1 at 5: deadlock: waits for NORM of every rank; rank 0 waits at TIE",
    ]
    twice = "rank 0: F0 B0 REDUCE NORM UPDATE PUBLISH F1 B1 REDUCE NORM UPDATE PUBLISH\nrank 1:\nstage 0: 0"
    assert reasons(twice) == []  # a rank without a stage has nothing to sum
    of_many = build("gpipe", (1,) * 8, 1)
    untied = with_rank(of_many, 0, [Instruction(Op.TIE) if i.op is Op.NORM else i for i in of_many.ranks[0]])
    deadlock = "deadlock: waits for NORM of every rank; rank 0 waits at TIE, rank 2 waits at NORM, "
    assert list(never_stuck(untied))[1].reason.startswith(deadlock)
    assert list(never_stuck(untied))[1].reason.endswith("rank 5 waits at NORM, and 2 more")


def test_a_rank_may_end_while_another_waits() -> None:
    text = """
    stage 0: 0 1
    rank 0: F0 B0 REDUCE NORM UPDATE PUBLISH REDUCE NORM UPDATE PUBLISH
    rank 1: F1 B1 REDUCE NORM UPDATE PUBLISH
    """
    assert reasons(text) == ["rank 0 at 6: deadlock: waits for REDUCE of stage 0; rank 1 has come to its end"]


# --- any schedule with one thing wrong ----------------------------------------------------------------


def places(program: Program, ops: tuple[Op, ...]) -> list[tuple[int, int]]:
    return [
        (rank, at) for rank, work in enumerate(program.ranks) for at, its in enumerate(work) if its.op in ops
    ]


@settings(deadline=None)
@given(shapes(), st.randoms(use_true_random=False))
def test_a_dropped_instruction_is_found_whatever_it_is(shape: Shape, chance: random.Random) -> None:
    program = add_gathers(shape.program()) if chance.random() < 0.3 else shape.program()
    rank, at = chance.choice(
        places(program, (*COMPUTE, *SENDS, *RECEIVES, Op.STASH, Op.POP, Op.GATHER, Op.FREE))
    )
    invalid = with_rank(program, rank, [its for place, its in enumerate(program.ranks[rank]) if place != at])
    assert find(invalid), (rank, program.ranks[rank][at])


@settings(deadline=None)
@given(shapes(), st.randoms(use_true_random=False))
def test_an_instruction_that_stands_twice_is_found(shape: Shape, chance: random.Random) -> None:
    program = shape.program()
    rank, at = chance.choice(places(program, (*COMPUTE, *SENDS, *RECEIVES, Op.STASH, Op.POP)))
    work = program.ranks[rank]
    assert find(with_rank(program, rank, [*work[: at + 1], *work[at:]]))


@settings(deadline=None)
@given(shapes(most_replicas=1), st.randoms(use_true_random=False))
def test_two_receives_of_one_way_that_change_places_are_found(shape: Shape, chance: random.Random) -> None:
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
    assert any("takes the wrong thing" in error.reason for error in find(with_rank(program, rank, work)))


def _pairs_of_receives(work: tuple[Instruction, ...]) -> list[tuple[int, int]]:
    at: dict[int | None, list[int]] = {}
    for place, its in enumerate(work):
        if its.op in RECEIVES:
            at.setdefault(its.peer, []).append(place)
    return [(one, other) for each in at.values() for one, other in pairwise(each)]


@settings(deadline=None)
@given(shapes(names=("pipedream", "pipedream-vertical", "pipedream-2bw")), st.randoms(use_true_random=False))
def test_a_backward_with_another_version_is_found(shape: Shape, chance: random.Random) -> None:
    program = shape.program()
    rank, at = chance.choice(places(program, (Op.BACKWARD,)))
    work = [*program.ranks[rank]]
    its = work[at]
    assert its.version is not None
    work[at] = its._replace(version=its.version + chance.choice([-1, 1]))
    assert any("used version" in error.reason for error in find(with_rank(program, rank, work)))


@settings(deadline=None)
@given(shapes(names=("pipedream", "pipedream-vertical", "pipedream-2bw")))
def test_a_version_that_is_popped_too_early_is_found(shape: Shape) -> None:
    program = shape.program()
    pops = places(program, (Op.POP,))
    assume(pops)
    rank, at = pops[0]
    work = [*program.ranks[rank]]
    work[at - 1 : at + 1] = [work[at], work[at - 1]]
    assume(work[at].op is Op.BACKWARD)
    assert any("is gone" in error.reason for error in find(with_rank(program, rank, work)))


# --- what is said -------------------------------------------------------------------------------------


def test_the_message_has_the_grid_the_places_and_the_reasons() -> None:
    program = build("1f1b", (1, 1), 2)
    invalid = with_rank(
        program, 0, [its for its in program.ranks[0] if its.op is not Op.SEND_ACTIVATION or its.microbatch]
    )
    with pytest.raises(UserError) as caught:
        check(invalid, lines={0: 4, 1: 5})
    assert str(caught.value) == (
        "1 error in schedule '1f1b', marked [ ] in the grid:\n\n"
        "time    0     1     2     3     4     5     6\n"
        "rank 0  F0    F1    ·     ·     ·     B0    B1\n"
        "rank 1  ·     ·     [RA0] F0    B0    F1    B1\n"
        "\n  - line 5, rank 1, RA0<0: rank 0 never sends it: there is no SA0>1 there"
    )


def test_of_many_ranks_and_a_long_time_the_neighbourhood_is_shown() -> None:
    program = build("1f1b", (1,) * 40, 60)
    work = [its for its in program.ranks[20] if its[:3] != (Op.BACKWARD, 20, 50)]
    with pytest.raises(UserError) as caught:
        check(with_rank(program, 20, work))
    grid = caught.value.title.splitlines()
    assert [line[:8].strip() for line in grid if line.startswith("rank")][:3] == [
        "rank 19",
        "rank 20",
        "rank 21",
    ]
    assert len(grid) < 30
    assert max(map(len, grid)) <= 100
    assert "[F50]" in caught.value.title


def test_many_missing_things_are_counted_not_listed() -> None:
    program = replace(build("1f1b", (1, 1), 2), microbatches=1_000_000_000)
    told = [error.reason for error in find(program)]
    assert len(told) == 4 * 5
    assert any("and 999999993 more" in reason for reason in told)


def test_a_good_program_is_let_through() -> None:
    check(build("zero-bubble", (2, 1, 3), 7))
    with pytest.raises(UserError, match="the backward of microbatch 0"):
        check(program_of("rank 0: F0 REDUCE NORM UPDATE PUBLISH"))
    check(program_of("rank 0: F0"), training=False)


@settings(deadline=None)
@given(programs(), st.booleans())
def test_no_program_is_a_traceback(program: Program, training: bool) -> None:
    """Whatever can be written is let through, or refused with sentences and a grid."""
    try:
        check(complete(program), training=training)
    except UserError as error:
        assert error.errors
        assert "time" in error.title


def test_only_transfers_have_another_rank() -> None:
    """Others with one were taken for receives."""
    program = build("gpipe", (1, 1), 2)
    first, *others = program.ranks[0]
    stray = replace(program, ranks=((first._replace(peer=1), *others), program.ranks[1]))
    assert [error.reason for error in find(stray)] == ["has nothing to do with rank 1"]


def test_so_many_errors_are_not_all_told() -> None:
    program = build("gpipe", (1,), 2000)
    with pytest.raises(UserError) as caught:
        check(replace(program, ranks=(program.ranks[0] * 2,)))
    assert caught.value.errors[-1] == "and 7000 more"
