"""Lowering: what each pass adds, literally; and that a pass leaves its input alone."""

from hypothesis import given, settings

from echelon.program import add_gathers, add_reductions, add_transfers, flushed, show
from echelon.program.instruction import COMPUTE, RECEIVES, SENDS
from tests.program.cases import Shape, program_of, shapes


def lines(text: str) -> list[str]:
    return [line.partition(": ")[2] for line in text.splitlines() if line.startswith("rank")]


def test_transfers_stand_right_after_what_they_send_and_before_their_use() -> None:
    assert lines(show(add_transfers(flushed("1f1b", (1, 1), 2)))) == [
        "F0 SA0>1 F1 SA1>1 RG0<1 B0 RG1<1 B1",
        "RA0<0 F0 B0 SG0>0 RA1<0 F1 B1 SG1>0",
    ]


def test_receives_keep_the_order_of_the_sends_on_a_way() -> None:
    """Microbatch 1 is used first, but microbatch 0 was sent first: it is received first, and once."""
    program = program_of("rank 0: F0 F1 B1 B0\nrank 1: F1 F0 B1 B0")
    assert lines(show(add_transfers(program))) == [
        "F0 SA0>1 F1 SA1>1 RG1<1 B1 RG0<1 B0",
        "RA0<0 RA1<0 F1 F0 B1 SG1>0 B0 SG0>0",
    ]


def test_what_nobody_sends_is_received_all_the_same_and_takes_nothing_else() -> None:
    """It may come from an earlier step of a pipeline that never drains; the check judges."""
    program = program_of("rank 0: F1 B0 B1\nrank 1: F1 B1")
    assert lines(show(add_transfers(program)))[0] == "F1 SA1>1 RG0<1 B0 RG1<1 B1"


def test_reductions_follow_the_last_backward_of_each_stage() -> None:
    program = program_of("stage 0: 0\nstage 1: 0\nrank 0: F0@0 F0@1 I0@1 I0@0 W0@0 W0@1")
    assert lines(show(add_reductions(program))) == ["F0@0 F0@1 I0@1 I0@0 W0@0 REDUCE@0 W0@1 REDUCE@1 UPDATE"]


def test_a_replica_without_a_microbatch_takes_part_in_the_reduction() -> None:
    assert lines(show(add_reductions(flushed("1f1b", (3, 1), 2))))[2] == "REDUCE UPDATE"


def test_gathers_begin_before_the_wait() -> None:
    program = add_gathers(add_transfers(flushed("1f1b", (1, 1), 1)))
    assert lines(show(program)) == [
        "GATHER F0 FREE SA0>1 GATHER RG0<1 B0 FREE",
        "GATHER RA0<0 F0 FREE GATHER B0 FREE SG0>0",
    ]


@settings(deadline=None)
@given(shapes())
def test_no_pass_changes_the_computation(shape: Shape) -> None:
    whole = add_gathers(shape.program())
    if shape.name.startswith("pipedream"):
        return
    plain = flushed(shape.name, shape.replicas, shape.microbatches, shape.chunks)
    kept = tuple(tuple(its for its in rank if its.op in COMPUTE) for rank in whole.ranks)
    assert kept == plain.ranks
    moved = [its for rank in whole.ranks for its in rank]
    assert sum(its.op in SENDS for its in moved) == sum(its.op in RECEIVES for its in moved)
