"""Traces: when each instruction and each collective of some steps ran, on every rank, for Perfetto.

Every step has marks between its instructions (span_timer.py) and the moves of its ledger. The recorder keeps
those of its steps and reads none of them while the window is open: on a GPU, reading waits for the device.
When the window is over, rank 0 gathers them and writes trace.json.
"""

import json
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, final

import torch

from echelon.collectives.agreement import gather_values
from echelon.collectives.ledger import Move, StepMoves
from echelon.collectives.mesh import Mesh
from echelon.engine.step.runtime.span_timer import SpanTimer, StepSpans
from echelon.parallel.observer import StepObserver
from echelon.program import Instruction, Op, Program
from echelon.program.text import show_instruction
from echelon.state.checkpoint.atomic import write_file

DEFAULT_STEPS: Final = 3


@final
class Recorder(StepObserver):
    """Writes the trace of `steps` to `path`, on rank 0, when the last of them is done."""

    def __init__(
        self,
        steps: range,
        path: Path,
        mesh: Mesh,
        timer: SpanTimer,
        program: Program,
        done: Callable[[], None],
    ) -> None:
        """`done` is called when the file is written, or could not be. The next step may be the first."""
        self._steps, self._path, self._done = steps, path, done
        self._mesh, self._timer, self._program = mesh, timer, program
        self._kept: list[tuple[int, StepSpans, StepMoves]] = []

    def name_instructions(self, next_step: int) -> None:
        """Let profilers of a GPU see the names of instructions, while steps are recorded."""
        if self._mesh.device.type == "cuda":
            self._timer.ranges = NvtxRanges() if next_step in self._steps else None

    def after_timing(self, number: int, metrics: object) -> None:  # noqa: ARG002
        self.name_instructions(number + 1)
        spans = self._timer.take() if number in self._steps else None
        if spans is not None:
            self._kept.append((number, spans, self._mesh.ledger.step_moves()))
        if number + 1 >= self._steps.stop:
            self.finish()

    def finish(self) -> None:
        """Gather and write what there is. All ranks must call this."""
        self._timer.ranges = None
        try:
            rows = gather_values(self._record(), self._mesh.group("all"), self._mesh.device, "trace")
            if self._mesh.rank == 0 and any(row["steps"] for row in rows):
                _write(self._path, trace_text(rows, str(self._mesh.plan)))
        finally:
            self._kept = []
            self._done()

    def _record(self) -> dict[str, Any]:
        mesh, device = self._mesh, self._mesh.device
        stage_rank = mesh.group("pipeline").rank
        return {
            "rank": mesh.rank,
            "host": socket.gethostname(),
            # Hosts agree on the time of day, and not on when a clock of perf_counter began.
            "epoch": time.time() - time.perf_counter(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "position": mesh.position._asdict(),
            "stages": list(self._program.stages_of(stage_rank)),
            "steps": [
                {
                    "step": number,
                    "spans": [
                        [*each.instruction, float(each.start), float(each.end)] for each in spans.read()
                    ],
                    "moves": [_plain_move(move) for move in moves.read()],
                }
                for number, spans, moves in self._kept
            ],
        }


def _plain_move(move: Move) -> list[Any]:
    times = (move.start, move.seconds, move.wait_start, move.waited)
    return [move.axis, move.operation, move.subject, *move.traffic, *times]


@final
class NvtxRanges:
    """Names of instructions for Nsight."""

    push = staticmethod(torch.cuda.nvtx.range_push)
    pop = staticmethod(torch.cuda.nvtx.range_pop)


def _write(path: Path, text: str) -> None:
    """A trace that cannot be written ends no training."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text.encode())
    except OSError as error:
        warnings.warn(f"the trace {path} cannot be written: {error.strerror or error}", stacklevel=2)


# trace.json: the Trace Event Format of Chrome, which Perfetto and chrome://tracing read.
#
#     process    a rank
#     thread 1   steps
#            2   the instructions of the program, on the compute stream
#            3…  collectives and messages by axis; where several of one axis overlap, as many tracks
#
# Perfetto takes the threads 0 of all processes for one, the idle thread of Linux: none has that number.
#
# Times are in microseconds from the first event of any rank. `args` of an event has all that is known of it,
# so that a report can be made of the file alone; `otherData` has what does not change with time.

FORMAT = 1
STEPS, INSTRUCTIONS, FIRST_MOVES = 1, 2, 3  # threads
COMMUNICATION = "communication"  # the category of moves; that of an instruction is its name


def trace_text(ranks: Sequence[dict[str, Any]], plan: str) -> str:
    """The file of what the ranks have recorded (`Recorder`)."""
    shifts = _shifts(ranks)
    pairs = list(zip(ranks, shifts, strict=True))
    begin = min((start + shift for row, shift in pairs for start in _starts(row)), default=0.0)
    events = [event for row, shift in pairs for event in (*_names(row), *_events(row, shift - begin))]
    other = {
        "format": FORMAT,
        "plan": plan,
        "ranks": [
            {key: row[key] for key in ("rank", "host", "device", "position", "stages")} for row in ranks
        ],
    }
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n{lines}\n]}}\n'


def _shifts(ranks: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds to add to times of each rank. Ranks of one host have one clock, and its shift. They are from
    the first host's clock: seconds since 1970 have no digits left for parts of a microsecond."""
    of_host: dict[str, float] = {}
    for row in ranks:
        of_host.setdefault(row["host"], row["epoch"] - ranks[0]["epoch"])
    return [of_host[row["host"]] for row in ranks]


def _starts(row: dict[str, Any]) -> Iterator[float]:
    for step in row["steps"]:
        yield from (span[5] for span in step["spans"])
        yield from (move[6] for move in step["moves"])


def _names(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """How viewers call a rank and its tracks."""
    rank, position = row["rank"], row["position"]
    stages = " ".join(map(str, row["stages"]))
    label = f"rank {rank}: stage {stages}, replica {position['replica']}, on {row['host']}"
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": label}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    threads = ["steps", "instructions", *_tracks(row)]
    for thread, name in enumerate(threads, STEPS):
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {
            "ph": "M",
            "pid": rank,
            "tid": thread,
            "name": "thread_sort_index",
            "args": {"sort_index": thread},
        }


def _tracks(row: dict[str, Any]) -> list[str]:
    """The names of the tracks of moves: 'data', 'data 2' where two of that axis overlap."""
    lanes: dict[str, int] = {}
    for axis, lane in (place for step in row["steps"] for place in _lanes(step["moves"])):
        lanes[axis] = max(lanes.get(axis, 0), lane + 1)
    return [
        axis if lane == 0 else f"{axis} {lane + 1}" for axis in sorted(lanes) for lane in range(lanes[axis])
    ]


def _lanes(moves: Iterable[list[Any]]) -> list[tuple[str, int]]:
    """The axis of each move, and the first of its tracks that is free when the move begins."""
    places: dict[int, tuple[str, int]] = {}
    ends: dict[str, list[float]] = {}
    for index, move in sorted(enumerate(moves), key=lambda each: each[1][6]):
        axis, start, seconds = move[0], move[6], move[7]
        of_axis = ends.setdefault(axis, [])
        lane = next((lane for lane, end in enumerate(of_axis) if end <= start), len(of_axis))
        of_axis[lane : lane + 1] = [start + seconds]
        places[index] = (axis, lane)
    return [places[index] for index in sorted(places)]


def _events(row: dict[str, Any], shift: float) -> Iterator[dict[str, Any]]:
    tracks = _tracks(row)
    for step in row["steps"]:
        number, spans = step["step"], step["spans"]
        if spans:
            length = spans[-1][6] - spans[0][5]
            about = {"step": number}
            yield _event(row, STEPS, f"step {number}", "step", spans[0][5] + shift, length, about)
        for span in spans:
            yield _instruction_event(row, number, span, shift)
        for move, (axis, lane) in zip(step["moves"], _lanes(step["moves"]), strict=True):
            name = axis if lane == 0 else f"{axis} {lane + 1}"
            yield _move_event(row, number, move, FIRST_MOVES + tracks.index(name), shift)


def _instruction_event(row: dict[str, Any], step: int, span: Sequence[Any], shift: float) -> dict[str, Any]:
    code, stage, microbatch, peer, version, start, end = span
    op = Op(code)
    name = show_instruction(Instruction(op, stage, microbatch, peer, version), row["stages"])
    about = {"step": step, **dict(zip(Instruction._fields, span, strict=False))}
    category = op.name.lower().replace("_", " ")  # 'send activation', 'forward', …
    return _event(row, INSTRUCTIONS, name, category, start + shift, end - start, about)


def _move_event(
    row: dict[str, Any], step: int, move: Sequence[Any], thread: int, shift: float
) -> dict[str, Any]:
    start, seconds, wait_start, waited = move[6:]
    about = {
        "step": step,
        **dict(zip(("axis", "operation", "subject", "payload", "sent", "received"), move, strict=False)),
        "wait_ts": _microseconds(wait_start + shift),
        "wait_dur": _microseconds(waited),
    }
    name = f"{move[1]} {move[2]}".strip()
    return _event(row, thread, name, COMMUNICATION, start + shift, seconds, about)


def _event(
    row: dict[str, Any],
    thread: int,
    name: str,
    kind: str,
    start: float,
    seconds: float,
    about: dict[str, Any],
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": row["rank"],
        "tid": thread,
        "name": name,
        "cat": kind,
        "ts": _microseconds(start),
        "dur": _microseconds(seconds),
        "args": {key: value for key, value in about.items() if value is not None},
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3) + 0.0  # never -0.0: Perfetto drops what begins before 0
