"""Signs of life: each rank has a small slot. A launcher's is in a memory-mapped file, which the parent reads;
under torchrun it is in private memory, which the rank's own watchdog reads.

A rank writes to it with `beat`, `start_step`, `finish_step`, `at_instruction`, `enter_operation` and
`leave_operation`. In a plain script they do nothing. `hang.py` decides what silence means.
"""

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_TEXT_BYTES = 64


class _Slot(ctypes.Structure):
    _fields_ = (
        ("beats", ctypes.c_uint64),
        ("entered", ctypes.c_uint64),
        ("left", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("is_stepping", ctypes.c_bool),
        ("name", ctypes.c_char * _TEXT_BYTES),
        ("instruction", ctypes.c_char * _TEXT_BYTES),
    )


class Pulse(NamedTuple):
    """The content of one rank's slot: numbers of beats and operations, the name of the last operation, the
    instruction of the step's program that the rank's host is at ('' outside a step), and the last step that
    it began (1 is the first, 0: none), which it may be in."""

    beats: int
    entered: int
    left: int
    name: str
    instruction: str = ""
    step: int = 0
    is_stepping: bool = False

    @property
    def waits(self) -> bool:
        return self.entered > self.left


_slot: _Slot | None = None
_main_thread: int | None = None  # of a process with a slot


def beat() -> None:
    """Give a sign of life; call it in long work that has no operation with other ranks."""
    if _slot is not None:
        _slot.beats += 1


def start_step(number: int) -> None:
    """Note that this rank begins a step of the training; 1 is the first."""
    if _slot is not None:
        _slot.step, _slot.is_stepping = number, True


def finish_step() -> None:
    """Note that the last step is over, or queued on a device; a sign of life."""
    if _slot is not None:
        _slot.is_stepping = False
        _slot.beats += 1


def at_instruction(text: str) -> None:
    """Note which instruction of the step's program this rank's host begins ('RG5 of stage 1'); '' for none.

    On a GPU, waiting for an operation does not block the host. It blocks later, where it needs a result, so
    the last operation does not say where a rank hangs; the instruction does.
    """
    if _slot is not None and threading.get_ident() == _main_thread:
        _slot.instruction = text.encode()[:_TEXT_BYTES]


def enter_operation(name: str) -> None:
    """Note that this rank now waits for others in operation `name`. Operations do not nest.

    Only the main thread counts: a server's threads wait for requests all the time.
    """
    if _slot is not None and threading.get_ident() == _main_thread:
        _slot.name = name.encode()[:_TEXT_BYTES]
        _slot.entered += 1


def leave_operation(*, back_to: str = "") -> None:
    """Note that the last operation is over; and which one this rank is still in, if it was part of that."""
    if _slot is not None and threading.get_ident() == _main_thread:
        _slot.left += 1
        if back_to:
            _slot.name = back_to.encode()[:_TEXT_BYTES]


class Board:
    """The slots of all ranks, as the parent sees them; it makes the file."""

    def __init__(self, path: Path, ranks: int) -> None:
        path.write_bytes(bytes(ranks * ctypes.sizeof(_Slot)))
        self._slots = [_open_slot(path, rank) for rank in range(ranks)]

    def read(self) -> list[Pulse]:
        return [_read(slot) for slot in self._slots]


def take_slot(path: Path, rank: int) -> None:
    """Let the functions of this module write to the slot of `rank` in this process."""
    global _slot, _main_thread
    _slot, _main_thread = _open_slot(path, rank), threading.main_thread().ident


def take_private_slot() -> None:
    """Let the functions of this module write to memory of this process, for `read_own`."""
    global _slot, _main_thread
    _slot, _main_thread = _slot or _Slot(), threading.main_thread().ident


def read_own() -> Pulse:
    return _read(_slot or _Slot())


def _read(slot: _Slot) -> Pulse:
    name, instruction = (text.decode(errors="replace") for text in (slot.name, slot.instruction))
    return Pulse(slot.beats, slot.entered, slot.left, name, instruction, slot.step, slot.is_stepping)


def _open_slot(path: Path, rank: int) -> _Slot:
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return _Slot.from_buffer(memory, rank * ctypes.sizeof(_Slot))  # keeps the mapping alive


_PERIOD_SECONDS = 0.25


@contextmanager
def host_work(name: str) -> Iterator[None]:
    """Inside, this thread works alone, for as long as it takes: at 'the sample'.

    A second thread beats for it while it uses the processor, and names it where ranks are listed. Work that
    waits for a disk or a lock which never comes is silent, and found as a hang. Not for work that waits for a
    device: that uses the processor too.
    """
    if _slot is None:  # signs of life of this process are not read
        yield
        return
    done = threading.Event()
    clock = time.pthread_getcpuclockid(threading.get_ident())

    def beat_while_busy() -> None:
        last = time.clock_gettime(clock)
        while not done.wait(_PERIOD_SECONDS):
            now = time.clock_gettime(clock)
            if now > last and not read_own().waits:
                beat()
            last = now

    watcher = threading.Thread(target=beat_while_busy, name="echelon-beat", daemon=True)
    at_instruction(name)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        at_instruction("")
