"""Instructions on the time axis: spans, planned or measured, and the timeline of a whole program; simulation:
given costs, when each instruction of a program starts and ends. No device, no processes.

Integers and fractions stay exact: 1f1b with 4 stages and 8 microbatches has a bubble of Fraction(3, 11).
A program must have passed the check.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from echelon.errors import UserError
from echelon.program.instruction import COMPUTE, COPIES, RANK_LEVEL, RECEIVES, SENDS, Instruction, Op, Program
from echelon.program.readiness import BACKWARDS, Position, walk

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


Cost = Seconds | Sequence[Seconds]  # of every stage, or of each
_Slot = tuple[int, int | None]  # stage, microbatch


@dataclass(frozen=True)
class Costs:
    """Seconds of each kind of instruction: one number, or one for each stage. `transfer` is that of one hop.
    `store` and `fetch` are copies to host memory and back, of a whole microbatch: they run beside the
    computation, each direction one after the other.

    Each part of a backward in two parts costs half of `backward`, unless it is given.
    """

    forward: Cost = 1
    backward: Cost = 1
    backward_input: Cost | None = None
    backward_weight: Cost | None = None
    transfer: Seconds = 0
    reduce: Cost = 0
    tie: Cost = 0
    norm: Cost = 0
    update: Cost = 0
    publish: Cost = 0
    store: Cost = 0
    fetch: Cost = 0

    def table(self, stages: int) -> dict[Op, Sequence[Seconds]]:
        """The seconds of each kind of instruction at each stage; kinds that take no time are left out."""
        backward = _each(self.backward, stages)
        half = [each / 2 if isinstance(each, float) else Fraction(each, 2) for each in backward]
        halves = {Op.BACKWARD_INPUT: self.backward_input, Op.BACKWARD_WEIGHT: self.backward_weight}
        return {
            Op.FORWARD: _each(self.forward, stages),
            Op.BACKWARD: backward,
            **{op: half if cost is None else _each(cost, stages) for op, cost in halves.items()},
            **{op: _each(getattr(self, op.name.lower()), stages) for op in (Op.REDUCE, *RANK_LEVEL)},
        }

    def copies(self, stages: int) -> dict[Op, Sequence[Seconds]]:
        return {Op.STORE: _each(self.store, stages), Op.FETCH: _each(self.fetch, stages)}


def _each(cost: Cost, stages: int) -> Sequence[Seconds]:
    if not isinstance(cost, Sequence):
        return [cost] * stages
    if len(cost) != stages:
        raise UserError(f"{len(cost)} costs for {stages} stages: give one number, or one for each stage")
    return cost


def simulate(program: Program, costs: Costs | None = None) -> Timeline:
    """Run a program on paper: each instruction starts as early as the rule of readiness allows.
    `simulate(build("1f1b", (1,) * 4, 8)).bubble_fraction` is `Fraction(3, 11)`."""
    costs = costs or Costs()
    table = costs.table(program.stages)
    clock: list[Seconds] = [0] * len(program.ranks)
    starts: list[list[Seconds]] = [[] for _ in program.ranks]
    ends: list[list[Seconds]] = [[] for _ in program.ranks]
    meetings = _Meetings(ends)
    lanes = [_Lanes(costs.copies(program.stages)) for _ in program.ranks]
    for rank, position, causes in walk(program):
        op, stage, microbatch, peer, _ = program.ranks[rank][position]
        now = clock[rank]
        if op in COPIES:
            start, end = lanes[rank].copy(op, (stage, microbatch), now)
            starts[rank].append(start)
            ends[rank].append(end)
            continue
        if op in BACKWARDS:
            now = max(now, lanes[rank].fetched((stage, microbatch)))
        if causes:
            if peer is None:
                ready = meetings.ready(causes)
            else:
                sender, sent = causes[0]
                ready = ends[sender][sent] + costs.transfer
            if ready > now:
                now = ready
        starts[rank].append(now)
        if peer is None and op in table:
            now += table[op][stage]
        ends[rank].append(now)
        clock[rank] = now
    if any(len(done) < len(work) for done, work in zip(ends, program.ranks, strict=True)):
        raise UserError(f"schedule '{program.name}' gets stuck: echelon.program.check says where")
    return Timeline(program, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


class _Lanes:
    """The copies of one rank: one lane each way, beside its computation."""

    def __init__(self, costs: Mapping[Op, Sequence[Seconds]]) -> None:
        self._costs = costs
        self._free: dict[Op, Seconds] = dict.fromkeys(costs, 0)
        self._ends: dict[tuple[Op, _Slot], Seconds] = {}

    def copy(self, op: Op, slot: _Slot, now: Seconds) -> tuple[Seconds, Seconds]:
        """Return the start and the end of a copy that is issued now. A fetch waits for its store."""
        start = max(now, self._free[op], self._ends.get((Op.STORE, slot), 0))
        end = start + self._costs[op][slot[0]]
        self._free[op] = self._ends[op, slot] = end
        return start, end

    def fetched(self, slot: _Slot) -> Seconds:
        """Return when all that a forward saved is back for its backward."""
        return self._ends.get((Op.FETCH, slot), 0)


class _Meetings:
    """The times at which all ranks of a rendezvous have arrived: once, since its ranks share their causes."""

    def __init__(self, ends: Sequence[Sequence[Seconds]]) -> None:
        self._ends = ends
        self._times: dict[int, tuple[object, Seconds]] = {}  # by identity of the causes, which are kept alive

    def ready(self, causes: tuple[Position, ...]) -> Seconds:
        known = self._times.get(id(causes))
        if known is None:
            latest = max(self._ends[rank][position] for rank, position in causes)
            known = self._times[id(causes)] = (causes, latest)
        return known[1]


Step = Sequence[Span]  # of all ranks, those of one rank together and in their order


def measured_costs(steps: Sequence[Step], stages: int) -> Costs:
    """The median seconds over all steps: of each kind of work at each stage, and of a transfer."""
    durations: dict[tuple[Op, int], list[float]] = {}
    for span in (span for step in steps for span in work_spans(step)):
        durations.setdefault((span.op, span.instruction.stage), []).append(float(span.seconds))

    def each(op: Op) -> list[float]:
        return [median(durations.get((op, stage), [0.0])) for stage in range(stages)]

    return Costs(
        forward=each(Op.FORWARD),
        backward=each(Op.BACKWARD),
        backward_input=each(Op.BACKWARD_INPUT),
        backward_weight=each(Op.BACKWARD_WEIGHT),
        update=each(Op.UPDATE),
        transfer=_transfer(steps),
    )


def _transfer(steps: Sequence[Step]) -> float:
    """The median hop: from the start of a send to the end of its receive. Only where the receiver was
    waiting: one that comes later finds the message, and shows nothing of the hop."""
    pairs = [pair for step in steps for pair in _pairs(step)]
    waited = [float(recv.end - send.start) for send, recv in pairs if recv.start <= send.start]
    return median(waited or [float(recv.seconds) for _, recv in pairs] or [0.0])


def _pairs(step: Step) -> Iterator[tuple[Span, Span]]:
    """Each send with its receive: the n-th from one rank to another is the n-th that this one receives."""
    sends: dict[tuple[int, int | None], list[Span]] = {}
    receives: dict[tuple[int | None, int], list[Span]] = {}
    for span in step:
        peer = span.instruction.peer
        if span.op in SENDS:
            sends.setdefault((span.rank, peer), []).append(span)
        elif span.op in RECEIVES:
            receives.setdefault((peer, span.rank), []).append(span)
    for (source, target), spans in sends.items():
        assert target is not None
        yield from zip(spans, receives.get((source, target), []), strict=True)
