"""trace.json read again, also when it is strange."""

import json
from typing import Any

import pytest

from echelon.program import Instruction, Op
from echelon.report.trace_reader import read_trace
from tests.report.folders import trace_of


def test_instructions_and_moves_come_back_in_seconds() -> None:
    trace = read_trace(json.loads(trace_of(2)))
    assert list(trace.steps) == [10, 11, 12]
    assert trace.ranks[1]["position"]["data"] == 1
    row = trace.steps[11][1]
    assert [span.instruction for span in row.spans] == [
        Instruction(Op.FORWARD, 0, 0),
        Instruction(Op.BACKWARD, 0, 0),
        Instruction(Op.REDUCE, 0),
        Instruction(Op.UPDATE, 0),
    ]
    assert (row.start, row.end, row.seconds) == pytest.approx((10.0, 15.0, 5.0))
    (move,) = row.moves
    assert (move.axis, move.sent) == ("data", 400)
    assert (move.start, move.end, move.wait_start, move.wait_end) == pytest.approx((12.0, 14.0, 13.5, 14.5))


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"traceEvents": None, "otherData": []},
        {"traceEvents": {"ph": "X"}, "otherData": {"ranks": 3}},
        {"traceEvents": [None, 3, {"ph": "X"}, {"ph": "X", "args": []}], "otherData": {"ranks": [None, {}]}},
        {"traceEvents": [{"ph": "X", "pid": -1, "args": {"step": 1}, "ts": 1, "dur": 1}]},
        {"traceEvents": [{"ph": "X", "pid": 1, "args": {"step": "1"}, "ts": 1, "dur": 1}]},
        {"traceEvents": [{"ph": "X", "pid": 1, "args": {"step": 1}, "ts": 1e999, "dur": 1}]},
    ],
)
def test_strange_files_have_no_steps(data: dict[str, Any]) -> None:
    trace = read_trace(data)
    assert trace.steps == {}
    assert trace.ranks == {}


def test_an_unknown_instruction_is_left_out() -> None:
    event = {"ph": "X", "pid": 0, "tid": 1, "ts": 0, "dur": 1, "args": {"step": 1, "op": "FLY"}}
    assert read_trace({"traceEvents": [event]}).steps[1][0].spans == []
