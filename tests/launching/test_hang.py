from pathlib import Path

import pytest

from echelon.launching import pulse
from echelon.launching.hang import Watch, doing, rank_to_blame
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
def test_the_rank_that_holds_the_others_up(
    pulses: list[Pulse], returned: tuple[int, ...], blamed: int
) -> None:
    rank, why = rank_to_blame(pulses, returned)
    assert rank == blamed
    assert why == f"seems to hold the others up: it {doing(pulses[blamed], blamed in returned)}"


def test_equal_ranks_are_called_equal() -> None:
    assert rank_to_blame([waits(3)] * 3, ()) == (0, "is only the first of ranks that are all equally far")


def test_what_a_rank_does_in_words() -> None:
    assert doing(waits(12, "all_reduce data"), returned=False) == "waits in all_reduce data (operation 12)"
    assert doing(works(1), returned=False) == "works outside any operation, after 1 operation"
    assert doing(works(2), returned=True) == "has returned, after 2 operations"


def test_a_change_in_any_slot_is_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr(pulse, "_mine", None)
    board = Board(tmp_path / "pulses", 2)
    pulse.take_slot(tmp_path / "pulses", 1)
    watch = Watch(board, deadline=10.0)
    now = 9.0
    pulse.beat()
    assert not watch.too_silent()
    now = 18.0
    assert not watch.too_silent()
    now = 19.5
    assert watch.too_silent()


def test_without_a_deadline_no_silence_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(Board(tmp_path / "pulses", 1), deadline=None)
    monkeypatch.setattr("time.monotonic", lambda: 1e12)
    assert not watch.too_silent()
    assert watch.period is None
