"""A rank's end of the pipe to the process that launched it, and the two kinds of message beside failure.

The parent's end lives in `member.py`.
"""

import os
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from echelon.launching.transport import pack

STOP = b""  # the parent's call that asks a rank to end; any other call is a packed (fn, args)


class Answer(NamedTuple):
    """A rank has done what it was asked; the first one, when it has joined its group, holds None."""

    value: Any


class Told(NamedTuple):
    """A rank has something to say while it works."""

    message: Any


class Channel:
    """Sends whole messages, from any thread of the rank."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def receive(self) -> bytes:
        return self._connection.recv_bytes()

    def send(self, data: bytes) -> None:
        with self._lock:
            self._connection.send_bytes(data)

    def close(self) -> None:
        self._connection.close()


_mine: Channel | None = None


def open_channel(connection: Connection) -> Channel:
    """Make `connection` the way on which `tell` speaks in this process, and not in those it forks."""
    global _mine
    _mine = Channel(connection)
    os.register_at_fork(after_in_child=_forget)
    return _mine


def _forget() -> None:
    """A data worker is no rank: it must not speak for one, nor hold its pipe open when it is dead."""
    global _mine
    if _mine is not None:
        _mine.close()
        _mine = None


def is_launched_rank() -> bool:
    """Whether this process is a rank that `launch` or `Ranks` started."""
    return _mine is not None


def tell(message: object) -> None:
    """Send `message` to the parent's `on_message(rank, message)`; does nothing outside a launched rank."""
    if _mine is not None:
        _mine.send(pack(Told(message)))
