"""A rank's end of the pipe to the process that launched it, and what it sends there besides failures.

The parent's end is in `rank_process.py`.
"""

import os
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from echelon.launching.messages.transport import pack

STOP = b""  # the parent's call that asks a rank to end; any other call is a packed (fn, args)


class Answer(NamedTuple):
    """The result of a call. A rank sends `Answer(None)` first, when it has joined its process group."""

    value: Any


class Message(NamedTuple):
    """What the user's function sends with `send_message` while it runs."""

    content: Any


class Channel:
    """Sends complete messages, from any thread of the rank."""

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


_channel: Channel | None = None


def open_channel(connection: Connection) -> Channel:
    """Let `send_message` use `connection` in this process, but not in processes that it forks."""
    global _channel
    _channel = Channel(connection)
    os.register_at_fork(after_in_child=_close_in_child)
    return _channel


def _close_in_child() -> None:
    """A data worker is no rank: it must not send in its name, nor keep its pipe open after its death."""
    global _channel
    if _channel is not None:
        _channel.close()
        _channel = None


def is_launched_rank() -> bool:
    """Whether this process is a rank that `launch` or `Ranks` started."""
    return _channel is not None


def send_message(content: object) -> None:
    """Send `content` to the parent's `on_message(rank, content)`; does nothing outside a launched rank."""
    if _channel is not None:
        _channel.send(pack(Message(content)))
