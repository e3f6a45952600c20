import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.launching import enter_operation, host_work, leave_operation
from echelon.launching.watch import pulse


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pulse.Board:
    """Three slots; this process writes to the one of rank 1 for the length of the test."""
    monkeypatch.setattr(pulse, "_slot", None)
    board = pulse.Board(tmp_path / "pulses", 3)
    pulse.take_slot(tmp_path / "pulses", 1)
    return board


def test_outside_a_rank_nothing_happens() -> None:
    pulse.beat()
    pulse.at_instruction("F0")
    pulse.enter_operation("barrier")
    pulse.leave_operation()


def test_only_the_own_slot_changes(board: pulse.Board) -> None:
    empty = pulse.Pulse(0, 0, 0, "")
    assert board.read() == [empty] * 3
    pulse.beat()
    pulse.beat()
    pulse.enter_operation("all_reduce data")
    assert board.read() == [empty, pulse.Pulse(2, 1, 0, "all_reduce data"), empty]


def test_a_rank_waits_from_enter_to_leave(board: pulse.Board) -> None:
    pulse.enter_operation("send")
    assert board.read()[1].waits
    pulse.leave_operation()
    assert not board.read()[1].waits


def test_a_part_of_an_operation_gives_its_name_back(board: pulse.Board) -> None:
    pulse.enter_operation("recv pipeline")
    pulse.enter_operation("compare recv pipeline")
    pulse.leave_operation(back_to="recv pipeline")
    assert board.read()[1] == pulse.Pulse(0, 2, 1, "recv pipeline")


def test_a_long_name_is_cut(board: pulse.Board) -> None:
    pulse.enter_operation("ä" * 100)  # two bytes each: the cut may fall inside a letter
    pulse.beat()
    last = board.read()[1]
    assert last.name.startswith("ä" * 30)
    assert (last.beats, last.entered) == (1, 1)


def test_the_instruction_stays_until_the_next_one(board: pulse.Board) -> None:
    pulse.at_instruction("RG5 of stage 1")
    pulse.enter_operation("recv pipeline")
    assert board.read()[1] == pulse.Pulse(0, 1, 0, "recv pipeline", "RG5 of stage 1")
    pulse.at_instruction("")
    assert board.read()[1].instruction == ""


def test_a_long_instruction_is_cut(board: pulse.Board) -> None:
    pulse.at_instruction("B" * 100)
    assert board.read()[1] == pulse.Pulse(0, 0, 0, "", "B" * 64)


def test_the_step_is_kept_after_it_is_over(board: pulse.Board) -> None:
    pulse.start_step(7)
    assert board.read()[1] == pulse.Pulse(0, 0, 0, "", "", 7, True)
    pulse.finish_step()
    assert board.read()[1] == pulse.Pulse(1, 0, 0, "", "", 7, False)


def test_a_process_without_a_parent_reads_its_own_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_slot", None)
    assert pulse.read_own() == pulse.Pulse(0, 0, 0, "")
    pulse.beat()
    assert pulse.read_own().beats == 0
    pulse.take_private_slot()
    pulse.enter_operation("barrier data")
    pulse.take_private_slot()  # keeps what is there
    assert pulse.read_own() == pulse.Pulse(0, 1, 0, "barrier data")


def test_an_instruction_of_another_thread_does_not_count(board: pulse.Board) -> None:
    thread = threading.Thread(target=pulse.at_instruction, args=("F0",))
    thread.start()
    thread.join()
    assert board.read()[1].instruction == ""


@pytest.fixture(autouse=True)
def _private_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_slot", None)
    pulse.take_private_slot()


def compute(seconds: float) -> None:
    """Use the processor for so long, whatever else the machine does."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def beats_of(work: Callable[[float], None], seconds: float) -> int:
    with host_work("the sample"):
        before = pulse.read_own().beats
        assert pulse.read_own().instruction == "the sample"
        work(seconds)
        return pulse.read_own().beats - before


def test_work_that_computes_gives_signs_of_life() -> None:
    assert beats_of(compute, 0.7) >= 1
    assert pulse.read_own().instruction == ""


def test_work_that_hangs_gives_none() -> None:
    assert beats_of(time.sleep, 0.8) <= 1  # it computes until it sleeps


def test_work_inside_an_operation_is_not_of_the_host_alone() -> None:
    enter_operation("all_reduce")
    assert beats_of(compute, 0.7) == 0
    leave_operation()


def test_nobody_looks_at_a_plain_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_slot", None)
    with host_work("the sample"):
        assert pulse.read_own().instruction == ""
