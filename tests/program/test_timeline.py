"""Spans and timelines: what each rank keeps, and how busy it is."""

from fractions import Fraction

from echelon.program import Costs, Instruction, Op, Span, Timeline, build, simulate
from tests.program.cases import program_of


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
