import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.launching import Ranks, launch, worker
from echelon.launching.channel import Channel
from echelon.launching.watch import pulse
from tests.launching import tasks
from tests.launching.processes import needs_proc, still_alive, wait_until


def test_a_rank_knows_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launch(tasks.nothing, 1)  # now the fork server runs, with the environment and folder of this moment
    monkeypatch.setenv("ECHELON_TEST_MARK", "set late")
    monkeypatch.chdir(tmp_path)
    first, second = launch(tasks.surroundings, 2, backend="gloo")
    assert second == {
        "environment": {
            "RANK": "1",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "ECHELON_TEST_MARK": "set late",
        },
        "threads": 1,
        "stdin": b"",
        "folder": str(tmp_path.resolve()),
        "backend": "gloo",
        "launched": True,
    }
    assert first["environment"]["RANK"] == "0"


def test_a_rank_without_its_parent_ends_quietly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After Ctrl-C while ranks start, their folder is gone, and nobody reads: each printed a traceback."""
    config = worker.RankConfig(0, 1, tmp_path / "gone", tmp_path, None, None, str(tmp_path), {}, {}, True)
    near, far = multiprocessing.Pipe()
    near.close()
    monkeypatch.setattr(worker, "end_with_parent", lambda _: None)
    monkeypatch.setattr(worker, "open_channel", Channel)
    monkeypatch.setattr(worker, "_set_up_process", lambda config: pulse.take_slot(config.board, config.rank))
    with far, pytest.raises(SystemExit) as caught:
        worker.main(config, far, {})
    assert caught.value.code == 1
    assert isinstance(caught.value.__context__, BrokenPipeError)


def test_every_rank_leads_a_session_of_its_own() -> None:
    for pid, session, group in launch(tasks.pid_and_group, 2):
        assert pid == session == group


@needs_proc
def test_nothing_listens_beyond_loopback() -> None:
    with Ranks(3) as ranks:
        pids = [pid for pid, _, _ in ranks.run(tasks.pid_and_group)]
        addresses = [address for pid in pids for address in listening_addresses(pid)]
    assert len(addresses) >= 3, "gloo listens in every rank, so the test has lost sight of it"
    assert {address for address in addresses if not is_loopback(address)} == set()


def listening_addresses(pid: int) -> list[str]:
    """The local addresses, in the kernel's hexadecimal, of the listening TCP sockets of a process."""
    links = [link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    sockets = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:")}
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets]


def is_loopback(address: str) -> bool:
    assert sys.byteorder == "little"
    v4 = address[-8:]  # an IPv6 address may hold one of IPv4
    mapped = len(address) == 8 or address.startswith("0000000000000000FFFF0000")
    return v4.endswith("7F") if mapped else address == "00000000000000000000000001000000"


SCRIPT = Path(__file__).parent / "scripts" / "sitting.py"
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


@pytest.mark.slow
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
