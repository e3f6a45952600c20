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

from echelon.collectives.work import cuda_clock
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
class StepSpans:
    """The spans of one rank's instructions in one step, or as far as it has come."""

    def __init__(self, clock: Clock, rank: int, instructions: Sequence[Instruction]) -> None:
        """The first of `instructions` begins now."""
        self._clock, self._rank, self._instructions = clock, rank, instructions
        self.marks: list[Any] = [clock.record()]  # between instructions, not read yet
        self._seconds: list[float] = []

    def add(self, instructions: Sequence[Instruction]) -> None:
        """These are of the same step, and follow."""
        self._instructions = [*self._instructions, *instructions]

    def read(self) -> list[Span]:
        """Waits for the device, if the instructions ran on one."""
        if self.marks:
            self._seconds += self._clock.read(self.marks)
            self.marks = []
        return [
            Span(self._rank, start, end, instruction)
            for (start, end), instruction in zip(  # fewer times than instructions if the step has failed
                pairwise(self._seconds), self._instructions, strict=False
            )
        ]

    def release(self) -> None:
        """Nobody will read them."""
        self._clock.release(*self.marks)
        self.marks = []

    @property
    def is_unread(self) -> bool:
        return bool(self.marks)


class Ranges(Protocol):
    """Names what a profiler of the device sees: NVTX."""

    def push(self, name: str) -> None: ...
    def pop(self) -> None: ...


@final
class SpanTimer:
    """The spans of the last step; of an earlier one, if somebody has taken them."""

    ranges: Ranges | None = None  # if somebody wants instructions named

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._step: StepSpans | None = None
        self._is_taken = False
        self._is_named = False  # the instruction that runs

    def start_step(self, rank: int, instructions: Sequence[Instruction], *, continues: bool = False) -> None:
        """The first of `instructions` begins now. `continues`: they are of the same step as those before."""
        if continues and self._step is not None and self._step.is_unread:
            self._step.add(instructions)
            return
        if self._step is not None and not self._is_taken:
            self._step.release()
        self._step, self._is_taken = StepSpans(self._clock, rank, instructions), False

    def start_instruction(self, label: str) -> None:
        if self._is_named:  # the one before has raised
            self._end_name()
        if self.ranges is not None:
            self.ranges.push(label)
            self._is_named = True

    def finish_instruction(self) -> None:
        """The next one begins now."""
        assert self._step is not None
        self._step.marks.append(self._clock.record())
        if self._is_named:
            self._end_name()

    def _end_name(self) -> None:
        if self.ranges is not None:
            self.ranges.pop()
        self._is_named = False

    def take(self) -> StepSpans | None:
        """The spans of the last step, to be read later: the next step leaves them."""
        self._is_taken = True
        return self._step

    @property
    def spans(self) -> list[Span]:
        """Waits for the device, if the instructions ran on one."""
        return [] if self._step is None else self._step.read()
