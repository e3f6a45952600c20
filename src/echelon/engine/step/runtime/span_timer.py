"""When the instructions of a step ran: by the host's clock, or on a GPU by events.

On a GPU the host queues the work of an instruction and goes on, so its clock says nothing about that work. An
event behind each instruction says when the compute stream has come so far:

    compute stream   event ─ F0 ─ event ─ (copy of SA0) ─ event ─ (waits for RG0) ─ event ─ B0 ─ event

The span of a send is the copy into the message; the message itself runs on a stream of its own. The span of a
receive is how long the compute stream stood still for it. Only reading the spans waits for the device.
"""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol, final

import torch

from echelon.collectives.cuda_timing import cuda_clock
from echelon.program import Instruction, Span


class Clock(Protocol):
    """Makes marks, and says later when they were made (time.perf_counter)."""

    def record(self) -> Any: ...
    def read(self, marks: Sequence[Any]) -> list[float]: ...
    def release(self, *marks: Any) -> None: ...


@final
class HostClock:
    """The clock of the CPU, where an instruction is done when the host has done it."""

    record = staticmethod(time.perf_counter)

    def read(self, marks: Sequence[float]) -> list[float]:
        return list(marks)

    def release(self, *marks: float) -> None: ...


def clock_of(device: torch.device) -> Clock:
    """The clock of what runs on `device`; the first one of a CUDA device synchronises."""
    return cuda_clock(device) if device.type == "cuda" else HostClock()


@final
class SpanTimer:
    """The spans of one rank's instructions, in the last step or as far as it has come."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rank = 0
        self._instructions: Sequence[Instruction] = ()
        self._marks: list[Any] = []  # between instructions, not read yet
        self._seconds: list[float] = []

    def start_step(self, rank: int, instructions: Sequence[Instruction], *, continues: bool = False) -> None:
        """The first of `instructions` begins now. `continues`: they are of the same step as those before."""
        if continues and self._marks:
            self._instructions = [*self._instructions, *instructions]
            return
        self._clock.release(*self._marks)
        self._rank, self._instructions = rank, instructions
        self._marks, self._seconds = [self._clock.record()], []

    def finish_instruction(self) -> None:
        """The next one begins now."""
        self._marks.append(self._clock.record())

    @property
    def spans(self) -> list[Span]:
        """Waits for the device, if the instructions ran on one."""
        if self._marks:
            self._seconds += self._clock.read(self._marks)
            self._marks = []
        return [
            Span(self._rank, start, end, instruction)
            for (start, end), instruction in zip(  # fewer times than instructions if the step has failed
                pairwise(self._seconds), self._instructions, strict=False
            )
        ]
