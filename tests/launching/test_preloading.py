import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "preloaded.py"


@pytest.mark.slow_cases("start_fork_server")
@pytest.mark.parametrize("function", [pytest.param("preload", marks=pytest.mark.slow), "start_fork_server"])
def test_a_rank_starts_with_what_was_preloaded_and_nothing_else(function: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, function], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[True, True, False]]
