from pathlib import Path

import pytest

from echelon.launching.watch import pulse
from echelon.launching.watch.hang import Watch, describe, main_frame, rank_to_blame
from echelon.launching.watch.pulse import Board, Pulse


def waits(operation: int, name: str = "all_reduce") -> Pulse:
    return Pulse(0, operation, operation - 1, name)


def works(operations: int) -> Pulse:
    return Pulse(0, operations, operations, "all_reduce")


@pytest.mark.parametrize(
    ("pulses", "returned", "blamed"),
    [
        ([waits(3), works(2), waits(3)], (), 1),
        ([waits(3), works(2), works(1)], (), 2),
        ([works(3), waits(4)], (0,), 0),
        ([works(3), works(2), waits(3)], (0,), 1),
        ([waits(3), waits(3), waits(2, "send")], (), 2),
        ([works(5), works(4)], (), 1),
    ],
)
def test_the_rank_that_blocks_the_others(pulses: list[Pulse], returned: tuple[int, ...], blamed: int) -> None:
    states = [f"state {rank}" for rank in range(len(pulses))]
    assert rank_to_blame(pulses, returned, states) == (
        blamed,
        f"seems to block the others: it state {blamed}",
    )


def test_ranks_at_the_same_point_are_reported_as_equal() -> None:
    assert rank_to_blame([waits(3)] * 3, (), ["waits"] * 3) == (
        0,
        "is only the first: all ranks are at the same point",
    )


def test_what_a_rank_does_in_words() -> None:
    assert describe(waits(12, "all_reduce data"), returned=False) == "waits in all_reduce data (operation 12)"
    assert describe(works(1), returned=False) == "works outside any operation, after 1 operation"
    assert describe(works(2), returned=True) == "has returned, after 2 operations"


def test_the_instruction_and_the_frame_of_a_rank_in_words() -> None:
    waiting = waits(12, "recv pipeline")._replace(instruction="RG5 of stage 1")
    assert describe(waiting, False, "in wait (x.py:3)") == (
        "is at RG5 of stage 1, waits in recv pipeline (operation 12)"
    )
    working = works(2)._replace(instruction="UPDATE")
    assert describe(working, False, "in item (loop.py:88)") == (
        "is at UPDATE, works outside any operation, after 2 operations, in item (loop.py:88)"
    )
    assert describe(working, True, "in receive (x.py:3)") == "has returned, after 2 operations"


def test_the_step_of_a_rank_in_words() -> None:
    waiting = waits(12, "recv pipeline")._replace(instruction="F0 of stage 1", step=7, is_stepping=True)
    rest = "waits in recv pipeline (operation 12)"
    assert describe(waiting, False) == f"is in step 7, at F0 of stage 1, {rest}"
    assert describe(waiting._replace(instruction=""), False) == f"is in step 7, {rest}"
    over = waiting._replace(is_stepping=False)
    assert describe(over, False) == f"has done step 7, is at F0 of stage 1, {rest}", "an evaluation"
    assert describe(over._replace(instruction=""), False) == f"has done step 7, {rest}"


def test_a_rank_in_another_operation_than_the_most_is_named() -> None:
    pulses = [waits(3, "all_reduce data"), waits(3, "barrier data"), waits(3, "all_reduce data")]
    assert rank_to_blame(pulses, (), ["a", "b", "c"]) == (1, "is in another operation than others: it b")


STACKS = """Thread 0x00007f01 (most recent call first):
  File "/lib/threading.py", line 324 in wait
  File "/lib/threading.py", line 1045 in _bootstrap

Current thread 0x00007f00 (most recent call first):
  File "/home/user/my project/loop.py", line 88 in read_loss
  File "/home/user/train.py", line 12 in <module>
"""


def test_the_frame_of_the_main_thread_is_found() -> None:
    """faulthandler writes the main thread last."""
    assert main_frame(STACKS) == "in read_loss (loop.py:88)"
    assert main_frame("") == ""
    assert main_frame(STACKS + "...\n") == "", "of many threads the last ones are missing"


def test_a_change_in_any_slot_is_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr(pulse, "_slot", None)
    board = Board(tmp_path / "pulses", 2)
    pulse.take_slot(tmp_path / "pulses", 1)
    watch = Watch(board, deadline=10.0)
    now = 9.0
    pulse.beat()
    assert not watch.deadline_passed()
    now = 18.0
    assert not watch.deadline_passed()
    now = 19.5
    assert watch.deadline_passed()


def test_without_a_deadline_no_silence_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(Board(tmp_path / "pulses", 1), deadline=None)
    monkeypatch.setattr("time.monotonic", lambda: 1e12)
    assert not watch.deadline_passed()
    assert watch.period is None
