"""Instructions on the time axis: spans, planned or measured, and the timeline of a whole program."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from echelon.program import counts
from echelon.program.instruction import COMPUTE, Instruction, Op, Program

Seconds = int | Fraction | float

WORK = COMPUTE | {Op.UPDATE}  # what keeps a rank busy; all else is communication, or waiting for it


class Span(NamedTuple):
    """When a rank executed an instruction: in a simulation, or in a real step."""

    rank: int
    start: Seconds
    end: Seconds
    instruction: Instruction

    @property
    def op(self) -> Op:
        return self.instruction.op

    @property
    def seconds(self) -> Seconds:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """When each instruction of each rank starts and ends."""

    program: Program
    starts: tuple[tuple[Seconds, ...], ...]
    ends: tuple[tuple[Seconds, ...], ...]

    @property
    def makespan(self) -> Seconds:
        """From the start of the program to the end of the last instruction."""
        return max((max(ends) for ends in self.ends if ends), default=0)

    @property
    def busy(self) -> tuple[Seconds, ...]:
        """For each rank the seconds in which it computes or updates."""
        return tuple(
            sum(end - start for instruction, start, end in self._rows(rank) if instruction.op in WORK)
            for rank in range(len(self.program.ranks))
        )

    @property
    def bubble_fraction(self) -> Fraction | float:
        """The idle part of all ranks' time: 1 − busy / (ranks · makespan)."""
        total = len(self.program.ranks) * self.makespan
        if not total:
            return Fraction(0)
        busy = sum(self.busy)
        return 1 - (busy / total if isinstance(total, float) else Fraction(busy) / total)

    @property
    def in_flight(self) -> tuple[int, ...]:
        return counts.in_flight(self.program)

    @property
    def versions(self) -> tuple[int, ...]:
        return counts.versions(self.program)

    def spans(self) -> Iterator[Span]:
        """Every instruction, rank by rank."""
        for rank in range(len(self.program.ranks)):
            for instruction, start, end in self._rows(rank):
                yield Span(rank, start, end, instruction)

    def _rows(self, rank: int) -> Iterator[tuple[Instruction, Seconds, Seconds]]:
        return zip(self.program.ranks[rank], self.starts[rank], self.ends[rank], strict=True)
