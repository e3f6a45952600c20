"""trace.json: what viewers read, from what ranks have recorded."""

import json
import math
from typing import Any

import pytest

from echelon.engine.traces.trace_file import COMMUNICATION, trace_text


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
