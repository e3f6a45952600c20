"""Rules between ranks: unmatched sends and receives, and deadlocks."""

from echelon.program import Instruction, Op, build
from echelon.program.rules.transfers import find_deadlocks, find_unmatched_transfers
from tests.program.cases import with_rank
from tests.program.rules.reasons import END, reasons


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
