"""A trace of an engine: every instruction of the program once per rank and step, and no other step."""

import json
import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from echelon.engine import Engine
from echelon.engine.step.runtime.span_timer import HostClock, SpanTimer
from echelon.engine.trace import COMMUNICATION, Recorder, trace_text
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.program import Instruction, Op
from echelon.program.text import show_instruction
from tests.cases import vectors
from tests.engine.step.runtime.watched_engine import engine_for

Warm = Callable[[int], Ranks]


def train(plan: str, path: Path, steps: range | None, made: int) -> list[tuple[list[str], int]]:
    """Train; returns, of each step, the words of the program and how many moves the ledger had."""
    rows = []
    with engine_for(plan) as engine:
        engine.trace(path, steps)
        for step in range(made):
            engine.step(engine.local(vectors(step)))
            rank = engine.mesh.group("pipeline").rank
            stages = engine.program.stages_of(rank)
            words = [show_instruction(span.instruction, stages) for span in engine.spans]
            moves = [move for move in engine.ledger.moves if move.subject != "trace"]
            rows.append((words, len(moves)))
        assert [type(each) for each in engine._setup.observers._all].count(Recorder) == 0 or made < 4
    return rows


def slices(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("plan", ["pipeline=2 microbatches=4", "data=2 zero=3 microbatches=2"])
def test_every_instruction_is_there_once_per_rank_and_step(
    plan: str, tmp_path: Path, warm_ranks: Warm
) -> None:
    path = tmp_path / "new" / "trace.json"
    of_ranks = warm_ranks(2).run(train, plan, path, range(2, 4), 4)
    found = slices(path)
    assert {event["args"]["step"] for event in found} == {2, 3}
    for rank, rows in enumerate(of_ranks):
        for step in (2, 3):
            words, num_moves = rows[step - 1]
            own = [e for e in found if e["pid"] == rank and e["args"]["step"] == step]
            assert [e["name"] for e in own if e["tid"] == 2] == words
            assert sum(e["tid"] > 2 for e in own) == num_moves > 0
            assert max(Counter(word for word in words if word not in ("GATHER", "FREE")).values()) == 1
            ends = [(e["ts"], e["ts"] + e["dur"]) for e in own if e["tid"] == 2]
            assert all(end == pytest.approx(start, abs=0.01) for (_, end), (start, _) in pairwise(ends))


def test_a_training_that_ends_before_the_window_does_leaves_what_there_was(tmp_path: Path) -> None:
    train("data=1", tmp_path / "trace.json", range(2, 9), 3)
    assert {event["args"]["step"] for event in slices(tmp_path / "trace.json")} == {2, 3}
    train("data=1", tmp_path / "none.json", range(7, 9), 2)
    assert not (tmp_path / "none.json").exists()


def test_by_default_the_next_three_steps_are_recorded(tmp_path: Path) -> None:
    train("data=1", tmp_path / "trace.json", None, 5)
    assert {event["args"]["step"] for event in slices(tmp_path / "trace.json")} == {1, 2, 3}


def traced(engine: Engine, steps: range) -> str:
    with pytest.raises(UserError) as caught:
        engine.trace("trace.json", steps)
    return str(caught.value)


def test_steps_that_are_over_and_a_second_trace_are_refused(tmp_path: Path) -> None:
    with engine_for("data=1") as engine:
        engine.step(vectors(0))
        for steps in (range(1, 3), range(3, 3), range(2, 8, 2)):
            assert "1 have been made; try steps=range(2, 5)" in traced(engine, steps)
        engine.trace(tmp_path / "trace.json", range(2, 3))
        assert "a trace is being recorded" in traced(engine, range(4, 5))
        engine.step(vectors(1))
        engine.trace(tmp_path / "again.json")


def test_a_trace_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with engine_for("data=1") as engine:
        engine.trace(tmp_path / "file" / "trace.json", range(1, 2))
        with pytest.warns(UserWarning, match="the trace .* cannot be written: (Not a directory|File exists)"):
            engine.step(vectors(0))
        assert engine.step(vectors(1)).loss > 0


class Names:
    """As NVTX, which names what runs between push and pop."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[str] = []

    def push(self, name: str) -> None:
        self.open.append(name)
        self.seen.append(name)

    def pop(self) -> None:
        self.open.pop()


def test_instructions_are_named_for_profilers_also_where_one_raises() -> None:
    timer, names = SpanTimer(HostClock()), Names()
    step = [Instruction(Op.FORWARD, microbatch=0), Instruction(Op.BACKWARD, microbatch=0)]
    timer.ranges = names
    timer.start_step(0, step)
    timer.start_instruction("F0")
    timer.finish_instruction()
    timer.start_instruction("B0")  # raises
    timer.start_step(0, step)
    timer.start_instruction("F0 again")
    assert names.open == ["F0 again"]
    timer.ranges = None
    timer.finish_instruction()
    timer.start_instruction("not named")
    assert names.seen == ["F0", "B0", "F0 again"]


def test_taken_spans_stay_when_the_next_step_runs() -> None:
    timer = SpanTimer(HostClock())
    assert timer.take() is None
    step = [Instruction(Op.FORWARD, microbatch=0)]
    timer.start_step(0, step)
    timer.finish_instruction()
    first = timer.take()
    timer.start_step(0, step)
    timer.finish_instruction()
    assert first is not None
    (taken,), (last,) = first.read(), timer.spans
    assert taken.end <= last.start


# trace.json: what viewers read, from what ranks have recorded.


def row(rank: int, host: str, epoch: float, start: float, moves: list[list[Any]]) -> dict[str, Any]:
    spans = [["F", 0, 2, None, None, start, start + 0.5], ["SA", 0, 2, 1, None, start + 0.5, start + 0.75]]
    return {
        "rank": rank,
        "host": host,
        "epoch": epoch,
        "device": "cpu",
        "position": {"replica": rank},
        "stages": [0],
        "steps": [{"step": 7, "spans": spans, "moves": moves}],
    }


def move(axis: str, start: float, seconds: float) -> list[Any]:
    return [axis, "all_reduce", "gradients", 100, 50, 60, start, seconds, start + seconds / 2, seconds / 2]


def events(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    trace = json.loads(trace_text(rows, "data=2"))
    assert (trace["otherData"]["plan"], trace["otherData"]["format"]) == ("data=2", 1)
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_an_instruction_is_a_named_slice_in_microseconds_from_the_first_event() -> None:
    step, forward, send = events(row(0, "a", 0.0, 100.0, []))
    assert (step["name"], step["ts"], step["dur"], step["tid"]) == ("step 7", 0.0, 750000.0, 1)
    assert (forward["name"], forward["cat"], forward["ts"], forward["dur"]) == (
        "F2",
        "forward",
        0.0,
        500000.0,
    )
    assert (send["name"], send["ts"], send["args"]["peer"], send["tid"]) == ("SA2>1", 500000.0, 1, 2)
    assert "version" not in send["args"]


def test_hosts_are_aligned_by_the_time_of_day_and_ranks_of_a_host_by_their_clock() -> None:
    starts = {
        event["pid"]: event["ts"]
        for event in events(
            row(0, "a", 1000.0, 100.0, []), row(1, "a", 1000.5, 100.25, []), row(2, "b", 1090.0, 10.125, [])
        )
        if event["name"] == "F2"
    }
    assert starts == {0: 0.0, 1: 250000.0, 2: 125000.0}


@pytest.mark.parametrize("start", [100.1, 54321.123456789, 0.3])
def test_nothing_begins_before_zero_and_times_keep_their_digits(start: float) -> None:
    """Perfetto drops a slice whose time is negative, and -0.0 is: the first instruction was missing."""
    now = 1_900_000_000.123  # a double of that size has steps of 0.24 microseconds
    found = events(row(0, "a", now, start, []), row(1, "b", now + 1.5, start - 1.5 + 1e-7, []))
    times = {(event["pid"], event["name"]): event["ts"] for event in found}
    assert all(math.copysign(1, time) > 0 for time in times.values())
    assert times[0, "F2"] == 0.0
    assert times[1, "F2"] == pytest.approx(0.1, abs=0.3)  # the clocks of two hosts are no better
    assert times[0, "SA2>1"] == times[1, "SA2>1"] - times[1, "F2"] == 500000.0


def test_moves_that_overlap_have_tracks_of_their_own() -> None:
    """Slices of one track must not overlap but inside each other: viewers drop them."""
    found = [
        move("data", 99.5, 1.0),
        move("tensor", 100.0, 1.0),
        move("data", 100.0, 1.0),
        move("data", 100.5, 1),
    ]
    slices = [event for event in events(row(0, "a", 0.0, 100.0, found)) if event["cat"] == COMMUNICATION]
    assert [(event["tid"], event["ts"]) for event in slices] == [
        (3, 0.0),
        (5, 500000.0),
        (4, 500000.0),
        (3, 1000000.0),
    ]
    assert slices[0]["name"] == "all_reduce gradients"
    assert slices[0]["args"] == {
        "step": 7,
        "axis": "data",
        "operation": "all_reduce",
        "subject": "gradients",
        "payload": 100,
        "sent": 50,
        "received": 60,
        "wait_ts": 500000.0,
        "wait_dur": 500000.0,
    }
    names = {
        event["tid"]: event["args"]["name"]
        for event in json.loads(trace_text([row(0, "a", 0.0, 100.0, found)], ""))["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert names == {1: "steps", 2: "instructions", 3: "data", 4: "data 2", 5: "tensor"}
