"""Instructions on the time axis: spans, planned or measured, and the timeline of a whole program."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from echelon.program.instruction import COMPUTE, Instruction, Op, Program

Seconds = int | Fraction | float

# How an instruction changes the number of activations that a rank keeps, and of its stashed versions.
_ACTIVATIONS = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_WEIGHT: -1}
_STASHED = {Op.STASH: 1, Op.POP: -1}

WORK = COMPUTE | {Op.UPDATE}  # what keeps a rank busy; all else is communication, or waiting for it


class Span(NamedTuple):
    """The time in which a rank executed an instruction: in a simulation, or in a real step."""

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
    """Start and end of each instruction of each rank."""

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
        """For each rank the most (stage, microbatch) pairs whose activations are alive at once.

        They live from the forward to the backward; to the backward for weights, where it has two parts. This
        follows from the order of the rank's instructions, whatever they cost.
        """
        return self._peaks(_ACTIVATIONS)

    @property
    def versions(self) -> tuple[int, ...]:
        """For each rank the most versions of the weights at once: the newest, and those that are stashed."""
        return tuple(1 + peak for peak in self._peaks(_STASHED))

    def _peaks(self, change: Mapping[Op, int]) -> tuple[int, ...]:
        # `accumulate` gives the count after each instruction.
        return tuple(
            max(accumulate((change.get(instruction.op, 0) for instruction in instructions), initial=0))
            for instructions in self.program.ranks
        )

    def spans(self) -> Iterator[Span]:
        """Every instruction, rank by rank."""
        for rank in range(len(self.program.ranks)):
            for instruction, start, end in self._rows(rank):
                yield Span(rank, start, end, instruction)

    def _rows(self, rank: int) -> Iterator[tuple[Instruction, Seconds, Seconds]]:
        return zip(self.program.ranks[rank], self.starts[rank], self.ends[rank], strict=True)


def work_spans(spans: Sequence[Span]) -> list[Span]:
    """The computations and updates: what a rank does alone. In all else ranks wait for each other."""
    return [span for span in spans if span.op in WORK]


def bubble_of(spans: Sequence[Span], ranks: int) -> float:
    """1 − busy / (ranks · length), from the start of the first work to the end of the last, on any rank.

    rank 0  F0 ·  B0
    rank 1  ·  F0 ·       ->  1/2
    """
    length = seconds_of(spans)
    busy = sum(float(span.seconds) for span in work_spans(spans))
    return 1 - busy / (ranks * length) if length else 0.0


def seconds_of(spans: Sequence[Span]) -> float:
    """From the start of the first work to the end of the last, on any rank."""
    shown = work_spans(spans)
    if not shown:
        return 0.0
    return float(max(span.end for span in shown) - min(span.start for span in shown))
