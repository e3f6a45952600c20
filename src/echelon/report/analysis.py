"""Where the time of a step went, from the spans of a trace.

A rank computes while a forward, a backward or an update runs and it waits for no one. It communicates while
a collective is under way; of a receive, which is posted long before its message is sent, only the waiting
counts.

    compute          computing, whatever else goes on
    exposed          communicating, and not computing
    idle             neither, from the first instruction of the step to the last
    overlap          of the time of communication, the part behind computation
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

from echelon.program import RECEIVES, Op
from echelon.program.simulate import WORK
from echelon.report.trace_reader import MoveSpan, RankStep, Trace

AXES = ("tensor", "context", "expert", "pipeline", "data")
Interval = tuple[float, float]  # start, end
_OF_EXPERTS = ("experts", "expert_data", "expert_shard", "expert_copies")


@dataclass
class RankTimes:
    """Mean seconds of one rank in a step."""

    rank: int
    step: float
    compute: float
    exposed: float
    idle: float
    communication: float
    overlap: float | None  # None: nothing was communicated
    parts: dict[str, float] = field(default_factory=dict)  # of the step: what nothing hides
    idle_by: dict[str, float] = field(default_factory=dict)  # by the kind of instruction it was in


class PathPart(NamedTuple):
    """A part of the critical path: this rank, in these instructions."""

    rank: int
    kind: str
    seconds: float


@dataclass
class Analysis:
    """Of all steps of a trace; `path` of the one with the median length."""

    ranks: list[RankTimes]
    slowest: int | None  # the rank that computes longest
    slowdown: float  # its compute over the median rank's
    path: list[PathPart]
    path_step: int | None


def analyse(trace: Trace) -> Analysis:
    """Times of each rank, who is slow, and what the step waited for in the end."""
    of_rank: dict[int, list[RankTimes]] = {}
    for step in trace.steps.values():
        for rank, row in step.items():
            if row.spans:
                of_rank.setdefault(rank, []).append(_times(row))
    ranks = [_mean(rows) for _, rows in sorted(of_rank.items())]
    computes = {row.rank: row.compute for row in ranks}
    slowest = max(computes, key=lambda rank: computes[rank], default=None)
    usual = median(computes.values()) if computes else 0.0
    slowdown = computes[slowest] / usual if slowest is not None and usual else 1.0
    number = typical_step(trace)
    path = critical_path(list(trace.steps[number].values())) if number is not None else []
    return Analysis(ranks, slowest, slowdown, path, number)


def typical_step(trace: Trace) -> int | None:
    """The step of median length."""
    lengths = sorted(
        (max(row.end for row in rows) - min(row.start for row in rows), number)
        for number, step in trace.steps.items()
        if (rows := [row for row in step.values() if row.spans])
    )
    return lengths[len(lengths) // 2][1] if lengths else None


def compute_intervals(row: RankStep) -> list[Interval]:
    """While the rank works and waits for no one."""
    waits = union((move.wait_start, move.wait_end) for move in row.moves)
    return without(union((s.start, s.end) for s in row.spans if s.instruction.op in WORK), waits)


def communication_intervals(moves: Iterable[MoveSpan]) -> list[Interval]:
    return union(
        (move.wait_start, move.wait_end) if move.operation == "recv" else (move.start, move.end)
        for move in moves
    )


def _times(row: RankStep) -> RankTimes:
    window = [(row.start, row.end)]
    compute = common(compute_intervals(row), window)
    communication = common(communication_intervals(row.moves), window)
    exposed = without(communication, compute)
    idle = without(without(window, compute), communication)
    total = length(communication)
    overlap = 1 - length(exposed) / total if total else None
    parts, idle_by = _parts(row, compute, exposed), _idle_by(row, idle)
    return RankTimes(
        row.rank, row.seconds, length(compute), length(exposed), length(idle), total, overlap, parts, idle_by
    )


def _parts(row: RankStep, compute: list[Interval], exposed: list[Interval]) -> dict[str, float]:
    """The step, divided: each moment belongs to one part."""
    update = union((s.start, s.end) for s in row.spans if s.instruction.op is Op.UPDATE)
    parts = {"optimizer": length(common(compute, update)), "compute": length(without(compute, update))}
    left = exposed
    for axis in (*AXES, "all ranks"):
        of_axis = communication_intervals(move for move in row.moves if _axis(move.axis) == axis)
        parts[axis] = length(common(left, of_axis))
        left = without(left, of_axis)
    parts["other"] = max(0.0, row.seconds - sum(parts.values()))
    return {name: seconds for name, seconds in parts.items() if seconds}


def _axis(name: str) -> str:
    """The axis of a group of several: what is summed over `weights` or `shard` is data parallelism."""
    if name in AXES:
        return name
    return "all ranks" if name in ("all", "stage", "tied") else "expert" if name in _OF_EXPERTS else "data"


def _idle_by(row: RankStep, idle: list[Interval]) -> dict[str, float]:
    """Idle seconds by where they were: in a receive, between instructions of the host, elsewhere."""
    receives = union((s.start, s.end) for s in row.spans if s.instruction.op in RECEIVES)
    inside = union((s.start, s.end) for s in row.spans)
    found = {
        "waiting for a stage": length(common(idle, receives)),
        "inside other instructions": length(common(idle, without(inside, receives))),
        "before and after instructions": length(without(idle, inside)),
    }
    return {cause: seconds for cause, seconds in found.items() if seconds}


def _mean(rows: Sequence[RankTimes]) -> RankTimes:
    def mean(name: str) -> float:
        return fmean(getattr(row, name) for row in rows)

    def means(name: str) -> dict[str, float]:
        keys = {key: None for row in rows for key in getattr(row, name)}
        return {key: fmean(getattr(row, name).get(key, 0.0) for row in rows) for key in keys}

    exposed, total = mean("exposed"), mean("communication")
    return RankTimes(
        rows[0].rank,
        mean("step"),
        mean("compute"),
        exposed,
        mean("idle"),
        total,
        1 - exposed / total if total else None,
        means("parts"),
        means("idle_by"),
    )


# The critical path: from the last end back to the first start, always over what was waited for.


def critical_path(rows: Sequence[RankStep]) -> list[PathPart]:
    """The chain of instructions that decided the length of a step, first to last.

    Before an instruction comes what ended last of: the one before it on its rank; the send of its message;
    for a sum over ranks, the arrival of the rank that came last.
    """
    rows = [row for row in rows if row.spans]
    if not rows:
        return []
    places = {row.rank: row.spans for row in rows}
    sends, meetings = _sends(rows), _meetings(rows)
    rank, at = max(
        ((row.rank, len(row.spans) - 1) for row in rows), key=lambda each: places[each[0]][each[1]].end
    )
    now, path = places[rank][at].end, list[PathPart]()
    while True:
        span = places[rank][at]
        cause = sends.get((rank, at)) or meetings.get((rank, at))
        arrival = span.start
        follow = None
        if cause is not None and cause[0] != rank:
            sent = places[cause[0]][cause[1]]
            sent_at = sent.end if span.instruction.op in RECEIVES else sent.start
            if span.start < sent_at < now:
                arrival, follow = sent_at, cause
        path.append(PathPart(rank, span.kind, max(0.0, now - arrival)))
        now = min(now, arrival)
        if follow is not None:
            rank, at = follow
            if span.instruction.op not in RECEIVES:
                at -= 1  # the other rank arrived there when the one before it ended
        else:
            at -= 1
        if at < 0:
            return _joined(reversed(path))


def _sends(rows: Sequence[RankStep]) -> dict[tuple[int, int], tuple[int, int]]:
    """The send of each receive, where both ranks are of one pipeline: the only one with that name."""
    by_message: dict[tuple[str, int, int | None], list[tuple[int, int]]] = {}
    for row in rows:
        for at, span in enumerate(row.spans):
            op, stage, microbatch, *_ = span.instruction
            if op is Op.SEND_ACTIVATION:
                by_message.setdefault(("activation", stage + 1, microbatch), []).append((row.rank, at))
            elif op is Op.SEND_GRADIENT:
                by_message.setdefault(("gradient", stage - 1, microbatch), []).append((row.rank, at))
    found = {}
    for row in rows:
        for at, span in enumerate(row.spans):
            op, stage, microbatch, *_ = span.instruction
            if op in RECEIVES:
                kind = "activation" if op is Op.RECV_ACTIVATION else "gradient"
                senders = by_message.get((kind, stage, microbatch), [])
                if senders:  # of several pipelines: that of the rank with the same place among its stage's
                    found[row.rank, at] = senders[_place(rows, row) % len(senders)]
    return found


def _place(rows: Sequence[RankStep], row: RankStep) -> int:
    stage = row.spans[0].instruction.stage
    return [each.rank for each in rows if each.spans[0].instruction.stage == stage].index(row.rank)


def _meetings(rows: Sequence[RankStep]) -> dict[tuple[int, int], tuple[int, int]]:
    """The last to arrive where ranks meet: REDUCE with those of the stage, NORM and the like with all."""
    arrivals: dict[tuple[Op, int, int], list[tuple[float, int, int]]] = {}
    for row in rows:
        seen: dict[tuple[Op, int], int] = {}
        for at, span in enumerate(row.spans):
            op = span.instruction.op
            if op in (Op.REDUCE, Op.NORM, Op.PUBLISH, Op.TIE):
                stage = span.instruction.stage if op in (Op.REDUCE, Op.PUBLISH) else -1
                count = seen[op, stage] = seen.get((op, stage), -1) + 1
                arrivals.setdefault((op, stage, count), []).append((span.start, row.rank, at))
    found = {}
    for met in arrivals.values():
        _, rank, at = max(met)
        found.update({(other, place): (rank, at) for _, other, place in met})
    return found


def _joined(path: Iterable[PathPart]) -> list[PathPart]:
    """Neighbours of the same rank and kind as one."""
    joined: list[PathPart] = []
    for part in path:
        if joined and (joined[-1].rank, joined[-1].kind) == (part.rank, part.kind):
            joined[-1] = joined[-1]._replace(seconds=joined[-1].seconds + part.seconds)
        elif part.seconds > 0:
            joined.append(part)
    return joined


# Sets of times as sorted, disjoint intervals.


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """union([(0, 2), (1, 3), (5, 6)])  ->  [(0, 3), (5, 6)]"""
    joined: list[Interval] = []
    for start, end in sorted(each for each in intervals if each[1] > each[0]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def common(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """What is in both: common([(0, 3)], [(1, 2), (2.5, 9)])  ->  [(1, 2), (2.5, 3)]"""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """What is in `first` alone: without([(0, 3)], [(1, 2)])  ->  [(0, 1), (2, 3)]"""
    left: list[Interval] = []
    for start, end in first:
        for begin, stop in common([(start, end)], second):
            if begin > start:
                left.append((start, begin))
            start = stop
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
