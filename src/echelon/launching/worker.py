"""The life of a launched rank: settle in, join the group, answer calls, leave.

What the parent does with the answers is in `ranks.py`.
"""

import faulthandler
import os
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from echelon.launching import failure, lifeline, pulse
from echelon.launching.channel import STOP, Answer, Channel, open_channel
from echelon.launching.transport import pack, unpack

STACKS_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class Seat:
    """All that a rank needs to know when it starts."""

    rank: int
    ranks: int
    folder: Path  # private to this launch; goes away with it
    server_folder: Path  # multiprocessing's own, for the fork server
    backend: str | None
    timeout_seconds: float | None
    working_directory: str
    environment: dict[str, str]

    @property
    def board(self) -> Path:
        return self.folder / "pulses"

    @property
    def stacks(self) -> Path:
        return self.folder / f"stacks-{self.rank}"


def main(seat: Seat, connection: Connection) -> None:
    """Run one rank until the parent says stop; a failure is reported, and then the parent ends us."""
    lifeline.hold((seat.folder, seat.server_folder))
    channel = open_channel(connection)
    try:
        _settle(seat)
        _join(seat)
        channel.send(pack(Answer(None)))
        while (call := channel.receive()) != STOP:
            _answer(channel, call)
        _leave()
    except BaseException as error:
        _flush()
        channel.send(pack(failure.from_exception(seat.rank, error)))
        # Stay until the parent ends us: if our sockets closed now, every peer would fail too.
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


def _settle(seat: Seat) -> None:
    """Make this process, forked from a server with an old world view, look like a child of the parent."""
    from echelon.launching import fork_server  # which this process has inherited

    fork_server.leave_server()
    os.chdir(seat.working_directory)
    os.environ.clear()
    os.environ.update(seat.environment | _rank_environment(seat))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    pulse.take_slot(seat.board, seat.rank)
    stacks = os.open(seat.stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)


def _rank_environment(seat: Seat) -> dict[str, str]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "RANK": str(seat.rank),
        "LOCAL_RANK": str(seat.rank),
        "WORLD_SIZE": str(seat.ranks),
        "LOCAL_WORLD_SIZE": str(seat.ranks),
        "OMP_NUM_THREADS": "1",
        # Nothing listens beyond this machine, unless the user names another interface.
        "GLOO_SOCKET_IFNAME": seat.environment.get("GLOO_SOCKET_IFNAME", loopback),
        "NCCL_SOCKET_IFNAME": seat.environment.get("NCCL_SOCKET_IFNAME", loopback),
    }


def _join(seat: Seat) -> None:
    import torch

    from echelon.launching import group

    torch.set_num_threads(1)
    meeting_place = str(seat.folder / "store")
    group.join_by_file(meeting_place, seat.rank, seat.ranks, seat.backend, seat.timeout_seconds)


def _flush() -> None:
    """What the function printed is out before the parent goes on, or ends this process."""
    sys.stdout.flush()
    sys.stderr.flush()


def _leave() -> None:
    from echelon.launching import group

    group.leave()
