"""The life of a launched rank: set up the process, join the group, answer calls, leave.

What the parent does with the answers is in `ranks.py`.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from echelon.launching.channel import STOP, Answer, Channel, open_channel, redirect_output, write_whole_lines
from echelon.launching.packing import pack, unpack
from echelon.launching.watch import failure, pulse

STACKS_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class RankConfig:
    """All that a rank needs to know when it starts."""

    rank: int
    ranks: int
    folder: Path  # private to this launch, and deleted with it
    server_folder: Path  # multiprocessing's own, for the fork server
    backend: str | None
    timeout_seconds: float | None
    working_directory: str
    environment: dict[str, str]
    overrides: dict[str, str]  # the user's, for this rank alone
    same_environment: bool  # no rank has overrides

    @property
    def board(self) -> Path:
        return self.folder / "pulses"

    @property
    def stacks(self) -> Path:
        return self.folder / f"stacks-{self.rank}"


def main(config: RankConfig, connection: Connection, outputs: Mapping[str, Connection]) -> None:
    """Run one rank until the parent asks it to stop. It reports a failure, and then the parent ends it."""
    end_with_parent((config.folder, config.server_folder))
    redirect_output(outputs)
    write_whole_lines()
    channel = open_channel(connection)
    try:
        _set_up_process(config)
        _join(config)
        channel.send(pack(Answer(None)))
        while (call := channel.receive()) != STOP:
            _answer(channel, call)
        from echelon.launching import group

        group.leave(together=True)
    except BaseException as error:
        _flush()
        try:
            channel.send(pack(failure.from_exception(config.rank, error)))
        except OSError:  # the parent has ended this launch, or itself
            sys.exit(1)
        # Stay until the parent ends this process: if its sockets closed now, every peer would fail too.
        threading.Event().wait()


def _answer(channel: Channel, call: bytes) -> None:
    fn, args = unpack(call)
    value = fn(*args)
    _flush()
    try:
        data = pack(Answer(value))
    except Exception as error:
        raise TypeError(f"its result of type {type(value).__name__} cannot be sent back: {error}") from error
    channel.send(data)


def _set_up_process(config: RankConfig) -> None:
    """Give this process the parent's folder and environment: the fork server has those of its own start."""
    os.chdir(config.working_directory)
    os.environ.clear()
    os.environ.update(config.environment | _rank_environment(config) | config.overrides)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    pulse.take_slot(config.board, config.rank)
    stacks = os.open(config.stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)


def _rank_environment(config: RankConfig) -> dict[str, str]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    defaults = {
        # Nothing listens beyond this machine, unless the user names another interface.
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        # torch would abort a rank whose NCCL watchdog is stuck for 8 minutes. The launcher watches the ranks
        # itself: it must find them alive when the deadline has passed, to name what each one waits for.
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    return {
        **{name: config.environment.get(name, value) for name, value in defaults.items()},
        "RANK": str(config.rank),
        "LOCAL_RANK": str(config.rank),
        "WORLD_SIZE": str(config.ranks),
        "LOCAL_WORLD_SIZE": str(config.ranks),
        "OMP_NUM_THREADS": "1",
    }


def _join(config: RankConfig) -> None:
    import torch
    from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but not marked so

    from echelon.hardware import ignore_torch_warnings
    from echelon.launching import group

    ignore_torch_warnings()
    torch.set_num_threads(1)
    store = FileStore(str(config.folder / "store"), config.ranks)  # a file, so that no port is opened
    limit = group.timeout(config.timeout_seconds)
    same_host = config.same_environment
    group.init_group(store, config.rank, config.ranks, config.backend, limit, same_host=same_host)


def _flush() -> None:
    """Write out what the function printed before the parent continues or ends this process."""
    sys.stdout.flush()
    sys.stderr.flush()


_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def end_with_parent(folders: Iterable[Path]) -> None:
    """End this process and all that it starts when its parent is gone, however that ended; delete `folders`.

    A parent that can still act ends its ranks itself (`rank_process.py`).
    """
    # With a session of its own, Ctrl-C reaches the parent only, and one killpg reaches every data worker.
    os.setsid()
    threading.Thread(target=_await_parents_end, args=(folders,), name="echelon-lifeline", daemon=True).start()
    if sys.platform == "linux":
        # For a rank that never lets Python threads run. The kernel sends this signal when the fork server
        # has ended, which takes longer than the watching thread needs to clean up.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _await_parents_end(folders: Iterable[Path]) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "multiprocessing starts every rank"
    # The sentinel is a pipe whose other end only the parent holds: the fork server, from which ranks are
    # forked, never had it.
    wait([parent.sentinel])
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
