"""The timeline: every slice of the steps that fit, and the same program simulated."""

import json

import pytest

from echelon.report import timeline as module
from echelon.report.timeline import timeline
from echelon.report.trace_reader import read_trace
from tests.report.folders import pipeline_trace, trace_of


def test_slices_are_columns_in_microseconds() -> None:
    found = timeline(read_trace(json.loads(trace_of(2))))
    assert found is not None
    assert [step["step"] for step in found["steps"]] == [10, 11, 12]
    row, track = found["steps"][0]["rows"][:2]
    assert (row["rank"], row["track"], track["track"]) == (0, "", "data")
    names = [found["names"][place] for place in row["slices"][::4]]
    assert names == ["F0", "B0", "REDUCE", "UPDATE"]
    assert row["slices"][2:4] == [0, 1_000_000]
    assert [found["kinds"][place] for place in track["slices"][1::4]] == ["communication: data"]
    assert (found["left_out"], found["num_ranks"]) == (0, 2)


def test_steps_that_do_not_fit_are_left_out_but_the_typical_one_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_SLICES", 11)
    found = timeline(read_trace(json.loads(trace_of(2))))
    assert found is not None
    assert len(found["steps"]) == 1
    assert found["left_out"] == 2


def test_the_simulation_has_the_program_and_the_costs_that_were_measured() -> None:
    found = timeline(read_trace(json.loads(pipeline_trace())))
    assert found is not None
    simulated = found["simulated"]
    assert [row["rank"] for row in simulated["rows"]] == [0, 1]
    assert simulated["measured_seconds"] == pytest.approx(10.1)
    # F 2, hop 0.5, F 1.5, B 2.5, hop 0.5, B 2, update 0.25
    assert simulated["seconds"] == pytest.approx(9.25, abs=0.3)
    assert 0 < simulated["bubble"] < 1


def test_no_trace_is_no_timeline_and_half_a_program_no_simulation() -> None:
    assert timeline(read_trace({})) is None
    data = json.loads(pipeline_trace())
    data["traceEvents"] = [event for event in data["traceEvents"] if event.get("name") != "SA0>1"]
    found = timeline(read_trace(data))
    assert found is not None
    assert found["simulated"] is None
