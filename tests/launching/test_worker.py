import multiprocessing
import sys
from pathlib import Path

import pytest

from echelon.launching import Ranks, launch, worker
from echelon.launching.messages.channel import Channel
from echelon.launching.watch import pulse
from tests.launching import tasks
from tests.launching.processes import needs_proc


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
    monkeypatch.setattr(worker.lifeline, "end_with_parent", lambda _: None)
    monkeypatch.setattr(worker, "open_channel", Channel)
    monkeypatch.setattr(worker, "_set_up_process", lambda config: pulse.take_slot(config.board, config.rank))
    with far, pytest.raises(SystemExit) as caught:
        worker.main(config, far)
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
