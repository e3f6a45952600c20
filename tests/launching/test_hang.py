from pathlib import Path

import pytest

from echelon.launching import pulse
from echelon.launching.hang import Watch, describe, rank_to_blame
from echelon.launching.pulse import Board, Pulse


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
    rank, why = rank_to_blame(pulses, returned)
    assert rank == blamed
    assert why == f"seems to block the others: it {describe(pulses[blamed], blamed in returned)}"


def test_ranks_at_the_same_point_are_reported_as_equal() -> None:
    assert rank_to_blame([waits(3)] * 3, ()) == (0, "is only the first: all ranks are at the same point")


def test_what_a_rank_does_in_words() -> None:
    assert describe(waits(12, "all_reduce data"), returned=False) == "waits in all_reduce data (operation 12)"
    assert describe(works(1), returned=False) == "works outside any operation, after 1 operation"
    assert describe(works(2), returned=True) == "has returned, after 2 operations"


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
