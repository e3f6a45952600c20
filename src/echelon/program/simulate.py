"""What a program takes: given costs, when each instruction starts and ends. No device, no processes.

Whole numbers and fractions stay exact: 1f1b with 4 stages and 8 microbatches has a bubble of Fraction(3, 11).
A program must have passed the check.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from echelon.errors import UserError
from echelon.program import counts
from echelon.program.instruction import COMPUTE, Instruction, Op, Program
from echelon.program.readiness import walk

Seconds = int | Fraction | float
Cost = Seconds | Sequence[Seconds]  # of every stage, or of each

_WORK = COMPUTE | {Op.UPDATE}


@dataclass(frozen=True)
class Costs:
    """Seconds of each kind of work: one number, or one for each stage. `transfer` is that of one hop.

    A backward that is cut in two costs half of `backward` each, unless told otherwise.
    """

    forward: Cost = 1
    backward: Cost = 1
    backward_input: Cost | None = None
    backward_weight: Cost | None = None
    transfer: Seconds = 0
    reduce: Cost = 0
    update: Cost = 0

    def table(self, stages: int) -> dict[Op, Sequence[Seconds]]:
        """The seconds of each kind of work at each stage; what has no cost is left out."""
        whole = _each(self.backward, stages)
        half = [_halved(seconds) for seconds in whole]
        return {
            Op.FORWARD: _each(self.forward, stages),
            Op.BACKWARD: whole,
            Op.BACKWARD_INPUT: half if self.backward_input is None else _each(self.backward_input, stages),
            Op.BACKWARD_WEIGHT: half if self.backward_weight is None else _each(self.backward_weight, stages),
            Op.REDUCE: _each(self.reduce, stages),
            Op.UPDATE: _each(self.update, stages),
        }


def _each(cost: Cost, stages: int) -> Sequence[Seconds]:
    if not isinstance(cost, Sequence):
        return [cost] * stages
    if len(cost) != stages:
        raise UserError(f"{len(cost)} costs for {stages} stages: give one number, or one for each stage")
    return cost


def _halved(seconds: Seconds) -> Seconds:
    return seconds / 2 if isinstance(seconds, float) else Fraction(seconds, 2)


class Span(NamedTuple):
    """One instruction on the time axis: planned, or as it was measured."""

    rank: int
    start: Seconds
    end: Seconds
    instruction: Instruction

    @property
    def op(self) -> Op:
        return self.instruction.op


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
            sum(end - start for its, start, end in self._rows(rank) if its.op in _WORK)
            for rank in range(len(self.program.ranks))
        )

    @property
    def bubble_fraction(self) -> Fraction | float:
        """The part of all ranks' time in which they have nothing to do: 1 − busy / (ranks · makespan)."""
        whole = len(self.program.ranks) * self.makespan
        if not whole:
            return Fraction(0)
        busy = sum(self.busy)
        return 1 - (busy / whole if isinstance(whole, float) else Fraction(busy) / whole)

    @property
    def in_flight(self) -> tuple[int, ...]:
        return counts.in_flight(self.program)

    @property
    def versions(self) -> tuple[int, ...]:
        return counts.versions(self.program)

    def spans(self) -> Iterator[Span]:
        """Every instruction, rank by rank."""
        for rank in range(len(self.program.ranks)):
            for its, start, end in self._rows(rank):
                yield Span(rank, start, end, its)

    def _rows(self, rank: int) -> Iterator[tuple[Instruction, Seconds, Seconds]]:
        return zip(self.program.ranks[rank], self.starts[rank], self.ends[rank], strict=True)


def simulate(program: Program, costs: Costs | None = None) -> Timeline:
    """Run a program on paper: each instruction as early as the rule of readiness lets it.

    simulate(build("1f1b", (1,) * 4, 8)).bubble_fraction  ->  Fraction(3, 11)
    """
    costs = costs or Costs()
    table = costs.table(program.stages)
    clock: list[Seconds] = [0] * len(program.ranks)
    starts: list[list[Seconds]] = [[] for _ in program.ranks]
    ends: list[list[Seconds]] = [[] for _ in program.ranks]
    for rank, place, causes in walk(program):
        its = program.ranks[rank][place]
        now = clock[rank]
        for other, before in causes:
            ready = ends[other][before] + (0 if its.peer is None else costs.transfer)
            if ready > now:
                now = ready
        starts[rank].append(now)
        if its.peer is None and its.op in table:
            now += table[its.op][its.stage]
        ends[rank].append(now)
        clock[rank] = now
    if any(len(done) < len(its) for done, its in zip(ends, program.ranks, strict=True)):
        raise UserError(f"schedule '{program.name}' gets stuck: echelon.program.check says where")
    return Timeline(program, tuple(map(tuple, starts)), tuple(map(tuple, ends)))
