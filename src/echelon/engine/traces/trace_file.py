"""trace.json: the Trace Event Format of Chrome, which Perfetto and chrome://tracing read.

    process    a rank
    thread 1   steps
           2   the instructions of the program, on the compute stream
           3…  collectives and messages by axis; where several of one axis overlap, as many tracks

Perfetto takes the threads 0 of all processes for one, the idle thread of Linux: none has that number.

Times are in microseconds from the first event of any rank. `args` of an event has all that is known of it, so
that a report can be made of the file alone; `otherData` has what does not change with time.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from echelon.program import Instruction, Op
from echelon.program.text import show_instruction

FORMAT = 1
STEPS, INSTRUCTIONS, FIRST_MOVES = 1, 2, 3  # threads
COMMUNICATION = "communication"  # the category of moves; that of an instruction is its name


def category(op: Op) -> str:
    """'send activation', 'forward', …"""
    return op.name.lower().replace("_", " ")


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
    """Seconds to add to times of each rank. Ranks of one host have one clock, and its shift.

    They are from the first host's clock: seconds since 1970 have no digits left for parts of a microsecond.
    """
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
    about = {
        "step": step,
        "op": code,
        "stage": stage,
        "microbatch": microbatch,
        "peer": peer,
        "version": version,
    }
    return _event(row, INSTRUCTIONS, name, category(op), start + shift, end - start, about)


def _move_event(
    row: dict[str, Any], step: int, move: Sequence[Any], thread: int, shift: float
) -> dict[str, Any]:
    axis, operation, subject, payload, sent, received, start, seconds, wait_start, waited = move
    about = {
        "step": step,
        "axis": axis,
        "operation": operation,
        "subject": subject,
        "payload": payload,
        "sent": sent,
        "received": received,
        "wait_ts": _microseconds(wait_start + shift),
        "wait_dur": _microseconds(waited),
    }
    name = f"{operation} {subject}".strip()
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
