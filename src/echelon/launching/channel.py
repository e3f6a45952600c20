"""The pipes between the launching process and a rank: what both ends send.

The parent's end is in `rank_process.py`; how values are packed is in `packing.py`. In a notebook the parent
also passes on what rank 0 writes, as it is written: only `sys.stdout` and `sys.stderr` of that process write
into the cell, and they are no files. Elsewhere ranks write to the files of the launching process themselves.
"""

import codecs
import inspect
import io
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from types import FunctionType
from typing import Any, NamedTuple

from echelon.errors import UserError, raise_errors
from echelon.launching.packing import FIX, is_main_importable, is_not_importable, pack

STOP = b""  # the parent's call that asks a rank to end; any other call is a packed (fn, args)


class Answer(NamedTuple):
    """The result of a call. A rank sends `Answer(None)` first, when it has joined its process group."""

    value: Any


class Message(NamedTuple):
    """A value that the user's function sends with `send_message` while it runs."""

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
    """Close the pipe: a data worker must not send in the rank's name, nor keep its pipe open."""
    global _channel
    if _channel is not None:
        _channel.close()
        _channel = None


def is_launched_rank() -> bool:
    """Return whether this process is a rank that `launch` or `Ranks` started."""
    return _channel is not None


def send_message(content: object) -> None:
    """Send `content` to the parent's `on_message(rank, content)`; does nothing outside a launched rank."""
    if _channel is not None:
        _channel.send(pack(Message(content)))


def pack_call(fn: Callable[..., object], args: Sequence[object]) -> bytes:
    """Return the bytes that ask a rank for `fn(*args)`; one error names every part that cannot be sent."""
    try:
        return pack((fn, tuple(args)))
    except UserError:
        raise
    except Exception:  # PicklingError, AttributeError, TypeError, and what the class of an argument raises
        errors = [_packing_error(arg) for arg in args]
        argument_errors = [
            f"argument {index} of type {type(arg).__name__} cannot be sent ({error}): send plain data, "
            "tensors or objects that pickle can copy, and make the rest inside the function"
            for index, (arg, error) in enumerate(zip(args, errors, strict=True))
            if error
        ]
        raise_errors("what is sent to the ranks", [*_function_errors(fn), *argument_errors])
        raise


def _function_errors(fn: Callable[..., object]) -> list[str]:
    error = _packing_error(fn)
    if not error:
        return []
    if isinstance(fn, FunctionType) and is_not_importable(fn):
        return _name_errors(fn) or [f"{_name(fn)} cannot be sent ({error}): {FIX}"]
    rule = "cannot be sent, because a rank finds a function by its name in a module"
    return [f"{_name(fn)} {rule} ({error}): {FIX} and pass what it needs as arguments"]


def _name_errors(fn: FunctionType) -> list[str]:
    """Return an error for each name that `fn` uses, of the notebook or a closure, that cannot be sent."""
    names = inspect.getclosurevars(fn)
    errors = {name: _packing_error(value) for name, value in {**names.globals, **names.nonlocals}.items()}
    return [
        f"{_name(fn)} uses {name}, which cannot be sent ({error}): make it inside the function"
        for name, error in errors.items()
        if error
    ]


def _name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _packing_error(value: object) -> str:
    try:
        pack(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


_DESCRIPTORS = {"stdout": 1, "stderr": 2}
_READ_BYTES = 2**20  # more than a pipe holds: one read takes all that is there


def streams_without_file() -> list[str]:
    """Return which of stdout and stderr can be written to by this process alone."""
    if is_main_importable():
        return []
    streams = {name: getattr(sys, name) for name in _DESCRIPTORS}
    return [name for name, stream in streams.items() if stream and not isinstance(stream, io.TextIOWrapper)]


class RankOutput:
    """Pipes for the named streams of a rank: it writes to `writers`; `forward` passes on what has come."""

    def __init__(self, names: Sequence[str]) -> None:
        pipes = {name: Pipe(duplex=False) for name in names}
        self._readers = {name: reader for name, (reader, _) in pipes.items()}
        self.writers = {name: writer for name, (_, writer) in pipes.items()}
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in names}

    @property
    def sources(self) -> list[Connection]:
        """Return what becomes readable when `forward` has something to do."""
        return list(self._readers.values())

    def forward(self) -> None:
        """Write what the rank has written to the streams of the same names here."""
        for name, reader in list(self._readers.items()):
            if reader.poll():
                data = os.read(reader.fileno(), _READ_BYTES)
                getattr(sys, name).write(self._decoders[name].decode(data, final=not data))
                if not data:  # the rank has ended
                    self._readers.pop(name).close()

    def close_writers(self) -> None:
        """The rank has its own: only then does its end close the pipes."""
        for writer in self.writers.values():
            writer.close()

    def close(self) -> None:
        """Pass on the rest, and close the pipes."""
        self.forward()
        self.close_writers()
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


def redirect_output(writers: Mapping[str, Connection]) -> None:
    """In a rank: write to these pipes instead; what the rank starts does so too."""
    for name, writer in writers.items():
        os.dup2(writer.fileno(), _DESCRIPTORS[name])
        writer.close()


def write_whole_lines() -> None:
    """In a rank: write each line at once, also under PYTHONUNBUFFERED: lines of several ranks do not mix."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
