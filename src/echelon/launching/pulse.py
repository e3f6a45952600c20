"""Signs of life: each rank has a small slot in a memory-mapped file, and the parent looks at them.

A rank writes through `beat`, `entered` and `left`; outside a launched rank (torchrun, a plain script)
they do nothing. What silence means is decided in `hang.py`.
"""

import ctypes
import mmap
import threading
from pathlib import Path
from typing import NamedTuple

_NAME_BYTES = 64


class _Slot(ctypes.Structure):
    _fields_ = (
        ("beats", ctypes.c_uint64),
        ("entered", ctypes.c_uint64),
        ("left", ctypes.c_uint64),
        ("name", ctypes.c_char * _NAME_BYTES),
    )


class Pulse(NamedTuple):
    """One rank's slot as it was read: operations are counted from 1, `name` is that of the last entered."""

    beats: int
    entered: int
    left: int
    name: str

    @property
    def waits(self) -> bool:
        """Whether the rank is inside an operation with other ranks."""
        return self.entered > self.left


_mine: _Slot | None = None


def beat() -> None:
    """Say that this rank is alive; call it in long work that has no operation with other ranks."""
    if _mine is not None:
        _mine.beats += 1


def entered(name: str) -> None:
    """Say that this rank now waits for others in operation `name`. Operations do not nest.

    Only the main thread's count: a server's threads wait for requests all the time.
    """
    if _mine is not None and threading.current_thread() is threading.main_thread():
        _mine.name = name.encode()[:_NAME_BYTES]
        _mine.entered += 1


def left() -> None:
    """Say that the operation entered last is over."""
    if _mine is not None and threading.current_thread() is threading.main_thread():
        _mine.left += 1


class Board:
    """The slots of all ranks, seen from the parent, which makes the file."""

    def __init__(self, path: Path, ranks: int) -> None:
        path.write_bytes(bytes(ranks * ctypes.sizeof(_Slot)))
        self._slots = [_open_slot(path, rank) for rank in range(ranks)]

    def read(self) -> list[Pulse]:
        """What every slot holds now, in rank order."""
        return [
            Pulse(slot.beats, slot.entered, slot.left, slot.name.decode(errors="replace"))
            for slot in self._slots
        ]


def take_slot(path: Path, rank: int) -> None:
    """From now on `beat`, `entered` and `left` in this process write to the slot of `rank`."""
    global _mine
    _mine = _open_slot(path, rank)


def _open_slot(path: Path, rank: int) -> _Slot:
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return _Slot.from_buffer(memory, rank * ctypes.sizeof(_Slot))  # keeps the mapping alive
