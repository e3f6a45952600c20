import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"

SLOW_MODULE = """
import time
import __main__

__main__.begun.set()
assert __main__.may_end.wait(600)
time.sleep(0.2)  # long enough for a fork that does not wait
is_whole = True
"""


@pytest.mark.slow
def test_ranks_of_the_second_launch_start_with_the_training_modules() -> None:
    """Those of the first do not have them, so no rank imports them by itself."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / "second_launch.py"], capture_output=True, text=True, check=True
    )
    first, second = json.loads(done.stdout)
    assert first == [[{"echelon.engine": False, "torch._dynamo": False}, True]] * 2
    assert second == [[{"echelon.engine": True, "torch._dynamo": True}, True]] * 2


def test_a_fork_waits_for_the_import_and_nothing_else_does(tmp_path: Path) -> None:
    assert import_and(tmp_path, "fork") == (0, "the main thread runs on\na normal exit\n", "")


def test_a_server_without_a_parent_ends_while_it_imports(tmp_path: Path) -> None:
    assert import_and(tmp_path, "end") == (0, "the main thread runs on\n", "")


def import_and(folder: Path, action: str) -> tuple[int, str, str]:
    (folder / "slow_module.py").write_text(SLOW_MODULE)
    command = [sys.executable, SCRIPTS / "importing_server.py", folder, action]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout, done.stderr
