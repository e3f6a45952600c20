import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.slow_cases("start_fork_server")
@pytest.mark.parametrize("function", [pytest.param("preload", marks=pytest.mark.slow), "start_fork_server"])
def test_a_rank_starts_with_what_was_preloaded_and_nothing_else(function: str) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "preloaded.py", function], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [[True, True, False]]


@pytest.mark.slow
def test_an_interrupt_just_after_the_start_of_a_server_leaves_no_second_one() -> None:
    """It comes before multiprocessing has noted the process: a server that it forgets lives forever."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, SCRIPTS / "pressed.py"], capture_output=True, text=True, check=True, env=environment
    )
    # Interrupted once; a tracker and a server were started, and both are left.
    assert done.stdout == "1 2 2\n"
