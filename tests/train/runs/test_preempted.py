"""A training that was asked to end is no failure."""

import subprocess
import sys

import pytest

from echelon.train.runs import Preempted


def end_at(step: int) -> None:
    try:
        raise Preempted(step)
    except Exception:
        pytest.fail("it was taken for a failure")


def test_no_handler_of_failures_takes_it() -> None:
    with pytest.raises(Preempted) as caught:
        end_at(7)
    assert caught.value.step == 7
    assert Preempted.exit_code == 75


def test_the_command_can_name_it_before_torch_is_imported() -> None:
    code = "import sys, echelon.train.runs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0
