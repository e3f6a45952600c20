import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "server_settings.py"
SIGNALS = SCRIPT.with_name("server_signals.py")


def hears(value: bool) -> dict[str, bool]:
    return {"hears Ctrl-C": value, "hears SIGTERM": value}


@pytest.mark.slow
def test_the_settings_of_the_fork_server_end_in_every_process_that_it_forks() -> None:
    """multiprocessing has one fork server: the user's own processes ran without garbage collection too."""
    paths = os.pathsep.join([str(SCRIPT.parent), *sys.path])  # the fork server has the path of its start
    done = subprocess.run(
        [sys.executable, SCRIPT], env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, check=True
    )
    found = json.loads(done.stdout)
    assert found["server"] == {"NVML": "1", "collects garbage": False, **hears(False)}
    usual = {"NVML": None, "collects garbage": True, **hears(True), "SIGUSR2 is free": True}
    for process in ("rank", "user's process"):
        frozen = found[process].pop("frozen")
        assert found[process] == usual, process
        assert frozen > 10_000, "it shares the memory of what the server has imported"
    changed = {"NVML": "mine", "collects garbage": False, "SIGUSR2 is free": False}
    assert found["fork of a rank"] == {**changed, **hears(True)}


@pytest.mark.parametrize("before", [[], ["not blocked"]])
def test_signals_of_the_terminal_are_for_the_parent_and_for_ranks(before: list[str]) -> None:
    assert subprocess.run([sys.executable, SIGNALS, *before], check=False).returncode == 0
