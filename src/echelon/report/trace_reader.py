"""Reads trace.json again: the instructions and moves of each rank and step, in seconds."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from echelon.engine.trace import COMMUNICATION
from echelon.program import Instruction, Op
from echelon.report.run_files import finite, whole

_OPS = {op.value: op for op in Op}


class InstructionSpan(NamedTuple):
    """An instruction as it ran."""

    name: str
    instruction: Instruction
    start: float
    end: float

    @property
    def kind(self) -> str:
        return self.instruction.op.name.lower().replace("_", " ")


class MoveSpan(NamedTuple):
    """A collective or a message: while it was under way, and while its caller waited for it."""

    name: str
    axis: str
    operation: str
    track: int
    sent: float
    received: float
    start: float
    end: float
    wait_start: float
    wait_end: float


@dataclass
class RankStep:
    """What one rank did in one step."""

    rank: int
    step: int
    spans: list[InstructionSpan] = field(default_factory=list)
    moves: list[MoveSpan] = field(default_factory=list)

    @property
    def start(self) -> float:
        starts = [span.start for span in self.spans] + [move.start for move in self.moves]
        return min(starts, default=0.0)

    @property
    def end(self) -> float:
        return max((span.end for span in self.spans), default=self.start)

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Trace:
    """The steps of all ranks. `ranks`: what the file says of each, by its number."""

    steps: dict[int, dict[int, RankStep]]  # step → rank → what it did
    ranks: dict[int, dict[str, Any]]


def read_trace(data: dict[str, Any]) -> Trace:
    """What can be read of the content of a file; anything strange in it is left out."""
    events = data.get("traceEvents")
    rows = events if isinstance(events, list) else []
    steps: dict[int, dict[int, RankStep]] = {}
    for event in rows:
        if not isinstance(event, dict) or event.get("ph") != "X" or not isinstance(event.get("args"), dict):
            continue
        rank, step = whole(event.get("pid")), whole(event["args"].get("step"))
        start, seconds = finite(event.get("ts")), finite(event.get("dur"))
        if rank is None or step is None or start is None or seconds is None:
            continue
        row = steps.setdefault(step, {}).setdefault(rank, RankStep(rank, step))
        _add(row, event, start / 1e6, (start + seconds) / 1e6)
    for of_step in steps.values():
        for row in of_step.values():
            row.spans.sort(key=lambda span: span.start)
            row.moves.sort(key=lambda move: move.start)
    return Trace({step: dict(sorted(steps[step].items())) for step in sorted(steps)}, _ranks(data))


def _add(row: RankStep, event: dict[str, Any], start: float, end: float) -> None:
    args, name = event["args"], str(event.get("name"))[:80]
    if event.get("cat") == COMMUNICATION:
        wait = finite(args.get("wait_ts")), finite(args.get("wait_dur"))
        begin = start if wait[0] is None else wait[0] / 1e6
        track = whole(event.get("tid")) or 0
        sent, received = finite(args.get("sent")) or 0.0, finite(args.get("received")) or 0.0
        axis, operation = str(args.get("axis"))[:40], str(args.get("operation"))[:40]
        waited = begin + (wait[1] or 0.0) / 1e6
        row.moves.append(MoveSpan(name, axis, operation, track, sent, received, start, end, begin, waited))
    elif args.get("op") in _OPS:
        stage = whole(args.get("stage")) or 0
        numbers = (whole(args.get(key)) for key in ("microbatch", "peer", "version"))
        row.spans.append(InstructionSpan(name, Instruction(_OPS[args["op"]], stage, *numbers), start, end))


def _ranks(data: dict[str, Any]) -> dict[int, dict[str, Any]]:
    other = data.get("otherData")
    rows: Iterable[Any] = other.get("ranks", ()) if isinstance(other, dict) else ()
    rows = rows if isinstance(rows, list) else ()
    found = {whole(row.get("rank")): row for row in rows if isinstance(row, dict)}
    return {rank: row for rank, row in found.items() if rank is not None}
