"""Work of the host alone gives signs of life while it computes, and none while it hangs."""

import time
from collections.abc import Callable

import pytest

from echelon.launching import enter_operation, host_work, leave_operation
from echelon.launching.watch import pulse


@pytest.fixture(autouse=True)
def _private_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_slot", pulse._Slot())


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
