"""Measured spans: the bubble by definition, and costs with which a simulation has the same bubble."""

import pytest

from echelon.plan import FLUSHED_SCHEDULES, SCHEDULES
from echelon.program import Costs, Instruction, Op, Span, build, measured, simulate
from echelon.program.instruction import RECEIVES


def make_span(
    rank: int, start: float, end: float, op: Op, microbatch: int | None = 0, peer: int | None = None
) -> Span:
    return Span(rank, start, end, Instruction(op, rank, microbatch, peer))


# rank 0  F0 F0 SA ·  ·  ·  ·  RG B0 B0 NORM UPDATE
# rank 1  RA RA RA F0 F0 B0 SG NORM, which waits for rank 0, UPDATE
STEP = [
    make_span(0, 10.0, 12.0, Op.FORWARD),
    make_span(0, 12.0, 12.5, Op.SEND_ACTIVATION, peer=1),
    make_span(0, 12.5, 18.0, Op.RECV_GRADIENT, peer=1),
    make_span(0, 18.0, 20.0, Op.BACKWARD),
    make_span(0, 20.0, 20.5, Op.NORM, None),
    make_span(0, 20.5, 21.5, Op.UPDATE, None),
    make_span(1, 9.0, 13.0, Op.RECV_ACTIVATION, peer=0),
    make_span(1, 13.0, 15.0, Op.FORWARD),
    make_span(1, 15.0, 16.0, Op.BACKWARD),
    make_span(1, 16.0, 16.5, Op.SEND_GRADIENT, peer=0),
    make_span(1, 16.5, 20.5, Op.NORM, None),
    make_span(1, 20.5, 21.0, Op.UPDATE, None),
]


def test_the_bubble_is_the_idle_part_from_the_first_computation_to_the_last_update() -> None:
    assert measured.seconds(STEP) == 11.5
    assert measured.bubble(STEP, ranks=2) == pytest.approx(1 - (2 + 2 + 2 + 1 + 1.5) / (2 * 11.5))
    assert measured.bubble(STEP, ranks=3) == pytest.approx(1 - 8.5 / 34.5)


def test_without_work_there_is_no_bubble() -> None:
    assert measured.bubble([], ranks=2) == 0.0
    assert measured.costs([], stages=2) == measured.costs([[]], stages=2)
    assert measured.costs([], stages=2).transfer == 0
    assert measured.costs([], stages=2).forward == [0, 0]


def test_every_update_is_work_and_the_wait_for_other_ranks_is_not() -> None:
    between = [*STEP[:6], make_span(0, 21.5, 22.0, Op.FORWARD, 1), *STEP[6:]]
    assert [span.op for span in measured.work(STEP)] == [Op.FORWARD, Op.BACKWARD, Op.UPDATE] * 2
    assert [span.op for span in measured.work(between)][:4] == [
        Op.FORWARD,
        Op.BACKWARD,
        Op.UPDATE,
        Op.FORWARD,
    ]
    assert measured.costs([STEP], 2).update == [1.0, 0.5]
    assert measured.costs([STEP], 2).norm == 0


def test_costs_are_medians_by_stage_and_direction() -> None:
    slow = [span._replace(end=span.end + 9 * (span.op is Op.FORWARD)) for span in STEP]
    costs = measured.costs([STEP, slow, STEP], stages=2)
    assert (costs.forward, costs.backward) == ([2.0, 2.0], [2.0, 1.0])
    assert (costs.backward_input, costs.backward_weight) == ([0.0, 0.0], [0.0, 0.0])


def test_a_hop_is_from_send_to_receive_where_the_receiver_waited() -> None:
    assert measured.costs([STEP], 2).transfer == pytest.approx((1.0 + 2.0) / 2)
    late = [span._replace(start=15.0, end=15.1) if span.op is Op.RECV_ACTIVATION else span for span in STEP]
    assert measured.costs([late], 2).transfer == pytest.approx(2.0)
    never = [span._replace(start=17.0, end=17.3) if span.op is Op.RECV_GRADIENT else span for span in late]
    assert measured.costs([never], 2).transfer == pytest.approx(0.2)


def as_measured(spans: list[Span]) -> list[Span]:
    """A simulated receive starts when its message arrives; an executed one when its rank comes to it."""
    measured_spans: list[Span] = []
    for span in spans:
        is_first = not measured_spans or measured_spans[-1].rank != span.rank
        start = 0.0 if is_first else measured_spans[-1].end
        measured_spans.append(span._replace(start=start) if span.op in RECEIVES else span)
    return measured_spans


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_simulation_with_the_measured_costs_equals_the_measured_timeline(name: str) -> None:
    """Costs alone explain these spans, so that no gap is left."""
    program = build(name, (1,) * 3, 6, 2 if name == "interleaved" else 1)
    weights = [0.5 + 0.25 * (stage % 3) for stage in range(program.stages)]
    costs = Costs(
        forward=weights, backward=2.0, backward_weight=0.5, transfer=0.125, update=[1.0] * program.stages
    )
    steps = [as_measured(list(simulate(program, costs).spans()))]
    again = list(simulate(program, measured.costs(steps, program.stages)).spans())
    assert measured.bubble(again, 3) == pytest.approx(measured.bubble(steps[0], 3), abs=1e-12)
    assert measured.seconds(again) == pytest.approx(measured.seconds(steps[0]))


@pytest.mark.parametrize("name", FLUSHED_SCHEDULES)
def test_the_bubble_of_a_timeline_is_its_own(name: str) -> None:
    line = simulate(build(name, (1,) * 3, 6, 2 if name == "interleaved" else 1))
    assert measured.bubble(list(line.spans()), 3) == pytest.approx(float(line.bubble_fraction), abs=1e-12)
