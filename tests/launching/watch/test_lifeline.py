"""However the launching process ends, its ranks, their children and its folder end too."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launching.processes import needs_proc, still_alive, wait_until

SCRIPT = Path(__file__).parents[1] / "scripts" / "sitting.py"
STARTING = SCRIPT.with_name("starting.py")
SLOW_MODULE = """
import os, time
with open(os.environ["NOTE"] + "~", "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, os.environ["NOTE"])
time.sleep(600)
"""

pytestmark = needs_proc


class Launched:
    """A process that launched 3 ranks, each with one child."""

    def __init__(self, folder: Path) -> None:
        # Sockets lie in it, whose names have at most 107 letters; pytest's own folders are long.
        notes, self.temporary = folder / "notes", Path(tempfile.mkdtemp(prefix="sitting-"))
        notes.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, notes],
            env=os.environ | {"TMPDIR": str(self.temporary)},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        all_started = wait_until(lambda: len(list(notes.glob("rank-?"))) == 3, 300)
        self.pids = [int(pid) for note in notes.glob("rank-?") for pid in note.read_text().split()]
        assert all_started, "the ranks did not start"

    def leaves_nothing(self) -> bool:
        return still_alive(self.pids) == [] and wait_until(lambda: not any(self.temporary.iterdir()), 2)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    launched = Launched(tmp_path)
    yield launched
    launched.process.kill()
    launched.process.communicate()
    shutil.rmtree(launched.temporary)
    for pid in still_alive(launched.pids, seconds=0):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_ctrl_c_ends_the_ranks_through_their_parent(launched: Launched) -> None:
    assert len(still_alive(launched.pids, seconds=0)) == 6
    assert len(list(launched.temporary.glob("pymp-*/echelon-*"))) == 1

    # Ctrl-C in a terminal goes to the whole foreground group; the ranks are not in it.
    os.killpg(launched.process.pid, signal.SIGINT)
    _, text = launched.process.communicate(timeout=60)
    assert text.strip() == "interrupted"
    assert launched.leaves_nothing()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_killed_parent_takes_its_ranks_along(launched: Launched, number: signal.Signals) -> None:
    launched.process.send_signal(number)
    assert launched.process.wait(timeout=60) == -number
    assert launched.leaves_nothing()


def test_the_fork_server_of_a_killed_parent_ends_with_its_folder_while_it_imports(tmp_path: Path) -> None:
    """No rank has started that could; on a busy machine, the server imported torch for a minute."""
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE)
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    with tempfile.TemporaryDirectory(prefix="starting-") as folder:
        environment = os.environ | {"TMPDIR": folder, "PYTHONPATH": paths, "NOTE": str(tmp_path / "note")}
        process = subprocess.Popen([sys.executable, STARTING], env=environment)
        assert wait_until((tmp_path / "note").exists, 300)
        (launch,) = Path(folder).glob("pymp-*/echelon-*")
        process.kill()
        process.wait()
        assert wait_until(lambda: not launch.parent.exists(), 60)
        assert not any(Path(folder).iterdir())
        assert still_alive([int((tmp_path / "note").read_text())]) == []
