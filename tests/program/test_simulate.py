"""Timelines from costs: exact, and each instruction as early as the rule of readiness allows."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import UserError
from echelon.plan import FLUSHED_SCHEDULES, SCHEDULES
from echelon.program import Costs, Instruction, Op, Program, Span, Timeline, build, simulate
from echelon.program.instruction import RECEIVES
from echelon.program.readiness import walk
from echelon.program.simulate import bubble_of, measured_costs, seconds_of, work_spans
from tests.program.cases import Shape, program_of, shapes


@pytest.mark.parametrize(
    ("name", "chunks", "bubble", "in_flight"),
    [
        ("gpipe", 1, Fraction(3, 11), (8, 8, 8, 8)),
        ("1f1b", 1, Fraction(3, 11), (4, 3, 2, 1)),
        ("naive", 1, Fraction(3, 4), (1, 1, 1, 1)),
        ("interleaved", 2, Fraction(3, 19), (11, 9, 7, 5)),
        ("zero-bubble", 1, Fraction(3, 19), (4, 4, 4, 4)),
    ],
)
def test_four_stages_and_eight_microbatches(
    name: str, chunks: int, bubble: Fraction, in_flight: tuple[int, ...]
) -> None:
    line = simulate(build(name, (1,) * 4, 8, chunks))
    assert line.bubble_fraction == bubble
    assert isinstance(line.bubble_fraction, Fraction)
    assert line.in_flight == in_flight


def test_every_start_and_end_of_a_small_program() -> None:
    line = simulate(build("1f1b", (1, 1), 2), Costs(forward=1, backward=2, transfer=3, reduce=5, update=7))
    seen = {
        f"{span.instruction.op.value}{span.instruction.microbatch}@{span.rank}": span[1:3]
        for span in line.spans()
    }
    assert seen["F0@0"] == (0, 1)
    assert seen["F1@0"] == (1, 2)
    assert seen["RA0@1"] == (4, 4)  # sent at 1, three seconds under way
    assert seen["F0@1"] == (4, 5)
    assert seen["B0@1"] == (5, 7)
    assert seen["B0@0"] == (10, 12)
    assert seen["REDUCENone@0"] == (15, 20)
    assert seen["UPDATENone@0"] == (20, 27)
    assert line.makespan == 27
    assert line.busy == (2 * 3 + 7, 2 * 3 + 7)
    assert line.bubble_fraction == 1 - Fraction(26, 54)


def test_costs_of_each_stage_and_of_the_halves_of_a_backward() -> None:
    slow_last = simulate(build("gpipe", (1, 1), 2), Costs(forward=[1, 3], backward=[2, 4]))
    assert slow_last.makespan == 1 + 2 * 3 + 2 * 4 + 2
    halves = Costs(forward=0, backward_input=5, backward_weight=1)
    assert simulate(build("zero-bubble", (1,), 3), halves).makespan == 3 * 6
    assert simulate(build("zero-bubble", (1,), 3), Costs(forward=0, backward=3)).makespan == 9
    assert simulate(build("1f1b", (1,), 1), Costs(forward=0.25, backward=0.5)).makespan == 0.75


def test_floats_give_floats() -> None:
    line = simulate(build("1f1b", (1,) * 4, 8), Costs(forward=0.1, backward=0.1))
    assert isinstance(line.bubble_fraction, float)
    assert line.bubble_fraction == pytest.approx(3 / 11)


def test_what_costs_nothing_has_no_bubble() -> None:
    assert simulate(build("1f1b", (1,) * 4, 8), Costs(forward=0, backward=0)).bubble_fraction == 0


def test_replicas_reduce_together() -> None:
    text = "stage 0: 0 1\nrank 0: F0 B0 F2 B2 REDUCE UPDATE\nrank 1: F1 B1 REDUCE UPDATE"
    line = simulate(program_of(text), Costs(reduce=3))
    assert line.starts[0][-2:] == (4, 7)
    assert line.starts[1][-2:] == (4, 7)  # the second waited from 2 on


def test_all_ranks_meet_at_tie_and_norm() -> None:
    program = build("gpipe", (1, 1), 1, ties=True)
    line = simulate(program, Costs(forward=[1, 5], backward=[7, 2], reduce=[0, 20], tie=2, norm=4, publish=1))
    ends = {(span.rank, span.op): (span.start, span.end) for span in line.spans()}
    for rank in (0, 1):  # rank 1 has reduced at 28, rank 0 at 15
        assert ends[rank, Op.TIE] == (28, 30)
        assert ends[rank, Op.NORM] == (30, 34)
        assert ends[rank, Op.PUBLISH] == (34, 35)
    assert line.busy == (8, 7)


def test_with_weight_versions_no_norm_waits_for_another_rank() -> None:
    line = simulate(build("pipedream", (1, 1), 2), Costs(norm=1))
    norms = [[span.start for span in line.spans() if span.op is Op.NORM and span.rank == r] for r in (0, 1)]
    assert norms == [[4, 7], [3, 6]]


def test_costs_for_another_number_of_stages_are_rejected() -> None:
    with pytest.raises(UserError, match="3 costs for 2 stages"):
        simulate(build("1f1b", (1, 1), 2), Costs(forward=[1, 2, 3]))


def test_a_program_that_gets_stuck_is_rejected() -> None:
    with pytest.raises(UserError, match="gets stuck"):
        simulate(program_of("rank 0: RG0<1 F0 SA0>1 B0\nrank 1: RA0<0 F0 B0 SG0>0"))


@settings(deadline=None)
@given(shapes(), st.integers(0, 3), st.integers(1, 3), st.integers(1, 3))
def test_each_instruction_starts_when_the_last_that_it_waits_for_has_ended(
    shape: Shape, transfer: int, forward: int, backward: int
) -> None:
    program = shape.program()
    line = simulate(program, Costs(forward=forward, backward=backward, transfer=transfer))
    count = 0
    for rank, index, causes in walk(program):
        hop = transfer if program.ranks[rank][index].peer is not None else 0
        before = [line.ends[rank][index - 1]] if index else [0]
        assert line.starts[rank][index] == max([*before, *(line.ends[r][i] + hop for r, i in causes)])
        count += 1
    assert count == sum(map(len, program.ranks))


@pytest.mark.parametrize("microbatches", [64, pytest.param(512, marks=pytest.mark.slow)])
def test_a_large_program_is_built_and_simulated_in_seconds(microbatches: int) -> None:
    """No bound on the time, which is the machine's: it is printed. Each instruction is visited once."""
    began = time.process_time()
    program: Program = build("interleaved", (1,) * 64, microbatches, 4)
    line = simulate(program)
    size = sum(map(len, program.ranks))
    print(f"{size} instructions: {time.process_time() - began:.2f} s of one core")
    # F, B, and their transfers but for the ends of the model; REDUCE of each chunk; NORM, UPDATE, PUBLISH
    assert size == 64 * (microbatches * 4 * 6 + 4 + 3) - 4 * microbatches
    assert line.bubble_fraction == Fraction(63, 4 * microbatches + 63)
    assert sum(1 for _ in walk(program)) == size


def test_copies_run_beside_the_computation() -> None:
    """Stores one after the other, a fetch after its store, a backward after its fetch."""
    program = program_of("rank 0: F0 S0 F1 S1 F2 T0 B0 T1 B1 B2 REDUCE NORM UPDATE PUBLISH")
    line = simulate(program, Costs(forward=1, backward=1, store=2, fetch=3))
    times = {f"{span.op.value}{span.instruction.microbatch}": span[1:3] for span in line.spans()}
    assert [times[f"F{k}"] for k in range(3)] == [(0, 1), (1, 2), (2, 3)]
    assert (times["S0"], times["S1"]) == ((1, 3), (3, 5))
    assert (times["T0"], times["B0"]) == ((3, 6), (6, 7))
    assert (times["T1"], times["B1"], times["B2"]) == ((7, 10), (10, 11), (11, 12))
    assert line.busy == (6,)
    assert simulate(program).makespan == 6, "they cost nothing unless it is said"


def test_each_part_of_a_backward_waits_for_a_fetch_of_its_own() -> None:
    program = program_of("rank 0: F0 S0 T0 I0 T0 W0 REDUCE NORM UPDATE PUBLISH")
    line = simulate(program, Costs(store=1, fetch=2, backward_input=1, backward_weight=1))
    starts = [span.start for span in line.spans() if span.op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
    assert starts == [4, 7]


def test_hidden_copies_cost_no_time() -> None:
    program = build("1f1b", (1,) * 4, 8)
    plain = simulate(program, Costs(forward=2, backward=4))
    copied = simulate(build("1f1b", (1,) * 4, 8, copies=True), Costs(forward=2, backward=4))
    assert copied.makespan == plain.makespan
    assert copied.bubble_fraction == plain.bubble_fraction


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
    assert seconds_of(STEP) == 11.5
    assert bubble_of(STEP, ranks=2) == pytest.approx(1 - (2 + 2 + 2 + 1 + 1.5) / (2 * 11.5))
    assert bubble_of(STEP, ranks=3) == pytest.approx(1 - 8.5 / 34.5)


def test_without_work_there_is_no_bubble() -> None:
    assert bubble_of([], ranks=2) == 0.0
    assert measured_costs([], stages=2) == measured_costs([[]], stages=2)
    assert measured_costs([], stages=2).transfer == 0
    assert measured_costs([], stages=2).forward == [0, 0]


def test_every_update_is_work_and_the_wait_for_other_ranks_is_not() -> None:
    between = [*STEP[:6], make_span(0, 21.5, 22.0, Op.FORWARD, 1), *STEP[6:]]
    assert [span.op for span in work_spans(STEP)] == [Op.FORWARD, Op.BACKWARD, Op.UPDATE] * 2
    assert [span.op for span in work_spans(between)][:4] == [
        Op.FORWARD,
        Op.BACKWARD,
        Op.UPDATE,
        Op.FORWARD,
    ]
    assert measured_costs([STEP], 2).update == [1.0, 0.5]
    assert measured_costs([STEP], 2).norm == 0


def test_costs_are_medians_by_stage_and_direction() -> None:
    slow = [span._replace(end=span.end + 9 * (span.op is Op.FORWARD)) for span in STEP]
    costs = measured_costs([STEP, slow, STEP], stages=2)
    assert (costs.forward, costs.backward) == ([2.0, 2.0], [2.0, 1.0])
    assert (costs.backward_input, costs.backward_weight) == ([0.0, 0.0], [0.0, 0.0])


def test_a_hop_is_from_send_to_receive_where_the_receiver_waited() -> None:
    assert measured_costs([STEP], 2).transfer == pytest.approx((1.0 + 2.0) / 2)
    late = [span._replace(start=15.0, end=15.1) if span.op is Op.RECV_ACTIVATION else span for span in STEP]
    assert measured_costs([late], 2).transfer == pytest.approx(2.0)
    never = [span._replace(start=17.0, end=17.3) if span.op is Op.RECV_GRADIENT else span for span in late]
    assert measured_costs([never], 2).transfer == pytest.approx(0.2)


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
    again = list(simulate(program, measured_costs(steps, program.stages)).spans())
    assert bubble_of(again, 3) == pytest.approx(bubble_of(steps[0], 3), abs=1e-12)
    assert seconds_of(again) == pytest.approx(seconds_of(steps[0]))


@pytest.mark.parametrize("name", FLUSHED_SCHEDULES)
def test_the_bubble_of_a_timeline_is_its_own(name: str) -> None:
    line = simulate(build(name, (1,) * 3, 6, 2 if name == "interleaved" else 1))
    assert bubble_of(list(line.spans()), 3) == pytest.approx(float(line.bubble_fraction), abs=1e-12)


def test_a_span_has_the_operation_and_the_duration_of_its_instruction() -> None:
    span = Span(3, Fraction(1, 2), 2, Instruction(Op.NORM))
    assert (span.op, span.seconds) == (Op.NORM, Fraction(3, 2))


def test_activations_live_from_the_forward_to_the_last_part_of_the_backward() -> None:
    assert Timeline(program_of("rank 0: F0 B0 F1 F2 B1 B2"), (), ()).in_flight == (2,)
    assert Timeline(program_of("rank 0: F0 I0 F1 I1 W0 W1"), (), ()).in_flight == (2,)
    assert Timeline(program_of("rank 0: F0 I0 W0 F1 I1 W1\nrank 1:"), (), ()).in_flight == (1, 0)


def test_versions_are_the_newest_and_those_stashed() -> None:
    assert Timeline(program_of("rank 0: F0 B0 UPDATE"), (), ()).versions == (1,)
    assert Timeline(
        program_of("rank 0: STASH0 UPDATE STASH1 UPDATE POP0 STASH2 UPDATE"), (), ()
    ).versions == (3,)


def test_computations_and_updates_are_work_and_all_else_is_not() -> None:
    costs = Costs(forward=1, backward=2, reduce=4, tie=8, norm=16, update=32, publish=64)
    line = simulate(build("gpipe", (1, 1), 2, ties=True), costs)
    assert line.busy == (2 * 3 + 32, 2 * 3 + 32)
    assert line.makespan == 3 + 3 * 2 + 4 + 8 + 16 + 32 + 64
    assert line.bubble_fraction == 1 - Fraction(2 * 38, 2 * 133)


def test_spans_are_those_of_the_program_rank_by_rank() -> None:
    program = build("1f1b", (1, 1), 2)
    spans = list(simulate(program).spans())
    assert [span.rank for span in spans] == [0] * len(program.ranks[0]) + [1] * len(program.ranks[1])
    assert [span.instruction for span in spans] == [*program.ranks[0], *program.ranks[1]]


def test_an_empty_timeline_takes_no_time() -> None:
    line = Timeline(program_of("rank 0:"), ((),), ((),))
    assert (line.makespan, line.busy, line.bubble_fraction) == (0, (0,), 0)
