"""Lowering: what each pass adds, literally; no pass changes the computations."""

import pytest
from hypothesis import given, settings

from echelon.plan import FLUSHED_SCHEDULES
from echelon.program import Op, add_copies, add_gathers, add_transfers, add_update, flushed, show
from echelon.program.instruction import COMPUTE, RECEIVES, SENDS
from echelon.program.lower import fill_update
from tests.program.cases import Shape, program_of, shapes


def lines(text: str) -> list[str]:
    return [line.partition(": ")[2] for line in text.splitlines() if line.startswith("rank")]


def test_transfers_stand_right_after_what_they_send_and_before_their_use() -> None:
    assert lines(show(add_transfers(flushed("1f1b", (1, 1), 2)))) == [
        "F0 SA0>1 F1 SA1>1 RG0<1 B0 RG1<1 B1",
        "RA0<0 F0 B0 SG0>0 RA1<0 F1 B1 SG1>0",
    ]


def test_receives_keep_the_order_of_the_sends_of_a_channel() -> None:
    """Microbatch 1 is used first, but microbatch 0 was sent first: it is received first, and once."""
    program = program_of("rank 0: F0 F1 B1 B0\nrank 1: F1 F0 B1 B0")
    assert lines(show(add_transfers(program))) == [
        "F0 SA0>1 F1 SA1>1 RG1<1 B1 RG0<1 B0",
        "RA0<0 RA1<0 F1 F0 B1 SG1>0 B0 SG0>0",
    ]


def test_a_receive_without_a_send_is_added_and_takes_no_other_message() -> None:
    """It may come from an earlier step of a pipeline that never drains; otherwise the check reports it."""
    program = program_of("rank 0: F1 B0 B1\nrank 1: F1 B1")
    assert lines(show(add_transfers(program)))[0] == "F1 SA1>1 RG0<1 B0 RG1<1 B1"


def test_the_update_stands_behind_all_work_in_the_order_of_the_stages() -> None:
    program = program_of("stage 0: 0\nstage 1: 0\nrank 0: F0@0 F0@1 I0@1 I0@0 W0@0 W0@1")
    work = "F0@0 F0@1 I0@1 I0@0 W0@0 W0@1"
    assert lines(show(add_update(program))) == [f"{work} REDUCE@0 REDUCE@1 NORM UPDATE PUBLISH"]
    assert lines(show(add_update(program, ties=True))) == [
        f"{work} REDUCE@0 REDUCE@1 TIE NORM UPDATE PUBLISH"
    ]


def test_the_update_stands_behind_the_last_send() -> None:
    assert lines(show(add_transfers(add_update(flushed("gpipe", (1, 1), 1)))))[1] == (
        "RA0<0 F0 B0 SG0>0 REDUCE NORM UPDATE PUBLISH"
    )


@pytest.mark.parametrize(
    ("absent", "filled"),
    [
        ({Op.NORM, Op.PUBLISH}, "F0v0 B0v0 REDUCE NORM STASH0 UPDATE PUBLISH POP0"),
        ({Op.NORM, Op.PUBLISH, Op.TIE}, "F0v0 B0v0 REDUCE TIE NORM STASH0 UPDATE PUBLISH POP0"),
        ({Op.PUBLISH}, "F0v0 B0v0 REDUCE STASH0 UPDATE PUBLISH POP0"),
        (set(), "F0v0 B0v0 REDUCE STASH0 UPDATE POP0"),
    ],
)
def test_what_is_absent_is_filled_in_around_each_update(absent: set[Op], filled: str) -> None:
    program = program_of("rank 0: F0v0 B0v0 REDUCE STASH0 UPDATE POP0")
    assert lines(show(fill_update(program, absent))) == [filled]


def test_a_tie_is_filled_in_before_the_norm_that_is_there() -> None:
    program = program_of("rank 0: F0 B0 REDUCE NORM UPDATE STASH1")
    assert lines(show(fill_update(program, {Op.TIE}))) == ["F0 B0 REDUCE TIE NORM UPDATE STASH1"]


def test_a_replica_without_a_microbatch_takes_part_in_the_reduction() -> None:
    assert lines(show(add_update(flushed("1f1b", (3, 1), 2))))[2] == "REDUCE NORM UPDATE PUBLISH"


def test_gathers_begin_before_the_wait() -> None:
    program = add_gathers(add_transfers(flushed("1f1b", (1, 1), 1)))
    assert lines(show(program)) == [
        "GATHER F0 FREE SA0>1 GATHER RG0<1 B0 FREE",
        "GATHER RA0<0 F0 FREE GATHER B0 FREE SG0>0",
    ]


@settings(deadline=None)
@given(shapes(names=FLUSHED_SCHEDULES))
def test_no_pass_changes_the_computation(shape: Shape) -> None:
    lowered = add_gathers(shape.program())
    order = flushed(shape.name, shape.replicas, shape.microbatches, shape.chunks)
    ops = [instruction.op for rank in lowered.ranks for instruction in rank]
    kept = [tuple(instruction for instruction in rank if instruction.op in COMPUTE) for rank in lowered.ranks]
    assert tuple(kept) == order.ranks
    assert sum(op in SENDS for op in ops) == sum(op in RECEIVES for op in ops)


def test_copies_stand_behind_a_send_and_before_what_a_backward_waits_for() -> None:
    assert lines(show(add_copies(add_transfers(flushed("1f1b", (1, 1), 2))))) == [
        "F0 SA0>1 S0 F1 SA1>1 S1 T0 RG0<1 B0 T1 RG1<1 B1",
        "RA0<0 F0 S0 T0 B0 SG0>0 RA1<0 F1 S1 T1 B1 SG1>0",
    ]
    halves = program_of("rank 0: F0 I0 F1 W0 I1 W1")
    assert lines(show(add_copies(halves))) == ["F0 S0 T0 I0 F1 S1 T0 W0 T1 I1 T1 W1"]


def test_copies_and_receives_at_the_end_of_a_list_stay() -> None:
    program = program_of("rank 0: F0 SA0>1 RG0<1\nrank 1: RA0<0 F0")
    assert lines(show(add_copies(program))) == ["F0 SA0>1 S0 RG0<1", "RA0<0 F0 S0"]
