"""Where time goes: by hand for traces whose answer is known."""

import json
import random

import pytest

from echelon.report.analysis import analyse, common, critical_path, length, union, without
from echelon.report.trace_reader import Trace, read_trace
from tests.report.folders import pipeline_trace, trace_of


def trace(text: str) -> Trace:
    return read_trace(json.loads(text))


def test_computing_communicating_and_idle_add_up_to_the_step() -> None:
    """Rank 0 computes 0–3 and 4.5–5, an all-reduce runs 2–4: half of it behind the backward pass."""
    first, second = analyse(trace(trace_of(2))).ranks
    assert (first.step, first.compute, first.communication) == pytest.approx((5.0, 3.5, 2.0))
    assert (first.exposed, first.idle, first.overlap) == pytest.approx((1.0, 0.5, 0.5))
    assert first.parts == pytest.approx({"compute": 3.0, "optimizer": 0.5, "data": 1.0, "other": 0.5})
    assert first.idle_by == pytest.approx({"inside other instructions": 0.5})
    assert (second.compute, second.exposed, second.overlap) == pytest.approx((4.0, 0.5, 0.75))
    for rank in (first, second):
        assert rank.compute + rank.exposed + rank.idle == pytest.approx(rank.step)
        assert sum(rank.parts.values()) == pytest.approx(rank.step)


def test_the_rank_that_computes_longest_is_the_straggler() -> None:
    found = analyse(trace(trace_of(3)))
    assert found.slowest == 1
    assert found.slowdown == pytest.approx(4.0 / 3.5)


def test_the_critical_path_goes_through_the_rank_that_came_last() -> None:
    step = trace(trace_of(2)).steps[11]
    path = critical_path(list(step.values()))
    assert [(part.rank, part.kind) for part in path] in (
        [(1, "forward"), (1, "backward"), (0, "reduce"), (0, "update")],
        [(1, "forward"), (1, "backward"), (1, "reduce"), (1, "update")],
    )
    assert [part.seconds for part in path] == pytest.approx([1.0, 2.5, 1.0, 0.5])


def test_the_critical_path_of_a_pipeline_follows_its_messages() -> None:
    path = analyse(trace(pipeline_trace())).path
    kinds = [(part.rank, part.kind) for part in path]
    assert kinds[:2] == [(0, "forward"), (0, "send activation")]
    assert kinds[2:5] == [(1, "recv activation"), (1, "forward"), (1, "backward")]
    assert (0, "backward") in kinds
    assert sum(part.seconds for part in path) == pytest.approx(10.1)


def test_nothing_traced_is_nothing_analysed() -> None:
    found = analyse(read_trace({}))
    assert (found.ranks, found.slowest, found.path, found.path_step) == ([], None, [], None)
    assert critical_path([]) == []


def test_a_receive_is_communication_only_while_its_stage_waits() -> None:
    """It is posted long before: the time until then belongs to nobody."""
    data = json.loads(trace_of(1))
    for event in data["traceEvents"]:
        if event.get("cat") == "communication":
            event["args"] |= {"operation": "recv", "wait_ts": event["ts"] + 1e6, "wait_dur": 1e6}
    (rank,) = analyse(read_trace(data)).ranks
    assert (rank.communication, rank.exposed) == pytest.approx((1.0, 1.0))


def test_the_examples_of_the_docstrings() -> None:
    assert union([(0, 2), (1, 3), (5, 6), (7, 7)]) == [(0, 3), (5, 6)]
    assert common([(0, 3)], [(1, 2), (2.5, 9)]) == [(1, 2), (2.5, 3)]
    assert without([(0, 3)], [(1, 2)]) == [(0, 1), (2, 3)]


def test_they_agree_with_sets_of_integers() -> None:
    draw = random.Random(0)
    for _ in range(300):
        sets = []
        for _ in range(2):
            starts = [draw.randrange(30) for _ in range(draw.randrange(6))]
            sets.append(union((start, start + draw.randrange(1, 8)) for start in starts))
        first, second = ({n for start, end in each for n in range(int(start), int(end))} for each in sets)
        for found, wanted in (
            (common(*sets), first & second),
            (without(*sets), first - second),
            (union([*sets[0], *sets[1]]), first | second),
        ):
            assert {n for start, end in found for n in range(int(start), int(end))} == wanted
            assert length(found) == len(wanted)
