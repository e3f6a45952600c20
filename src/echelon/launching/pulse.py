"""Signs of life: each rank has a small slot in a memory-mapped file, which the parent reads.

A rank writes to it with `beat`, `enter_operation` and `leave_operation`. Outside a launched rank (torchrun,
a plain script) they do nothing. `hang.py` decides what silence means.
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
    """What one rank's slot held: numbers of beats and operations, and the name of the last operation."""

    beats: int
    entered: int
    left: int
    name: str

    @property
    def waits(self) -> bool:
        """Whether the rank is inside an operation with other ranks."""
        return self.entered > self.left


_slot: _Slot | None = None


def beat() -> None:
    """Give a sign of life; call it in long work that has no operation with other ranks."""
    if _slot is not None:
        _slot.beats += 1


def enter_operation(name: str) -> None:
    """Note that this rank now waits for others in operation `name`. Operations do not nest.

    Only the main thread counts: a server's threads wait for requests all the time.
    """
    if _slot is not None and threading.current_thread() is threading.main_thread():
        _slot.name = name.encode()[:_NAME_BYTES]
        _slot.entered += 1


def leave_operation() -> None:
    """Note that the last operation is over."""
    if _slot is not None and threading.current_thread() is threading.main_thread():
        _slot.left += 1


class Board:
    """The slots of all ranks, as the parent sees them; it makes the file."""

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
    """Let `beat`, `enter_operation` and `leave_operation` of this process write to the slot of `rank`."""
    global _slot
    _slot = _open_slot(path, rank)


def _open_slot(path: Path, rank: int) -> _Slot:
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return _Slot.from_buffer(memory, rank * ctypes.sizeof(_Slot))  # keeps the mapping alive
