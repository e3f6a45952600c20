"""Which layers form segments, by literal lists."""

import pytest

from echelon.memory.recompute.recompute import backward_follows, divide
from echelon.plan import Plan
from echelon.program.build import step_program


@pytest.mark.parametrize(
    ("number", "sizes"),
    [
        (1, [1]),
        (2, [1, 1]),
        (3, [2, 1]),
        (4, [2, 2]),
        (5, [2, 2, 1]),
        (9, [3, 3, 3]),
        (12, [3, 3, 3, 3]),
        (16, [4, 4, 4, 4]),
        (18, [4, 4, 4, 3, 3]),
    ],
)
def test_sqrt_makes_as_many_segments_as_layers_in_each(number: int, sizes: list[int]) -> None:
    segments = divide(list(range(number)), "sqrt")
    assert [len(segment) for segment in segments] == sizes
    assert [layer for segment in segments for layer in segment] == list(range(number))


def test_full_makes_a_segment_of_each_layer() -> None:
    assert divide([0, 1, 2], "full") == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("plan", "at_once"),
    [
        ("data=1", [True]),
        ("microbatches=4", [True]),
        ("pipeline=2 microbatches=4 schedule=naive", [False, True]),
        ("pipeline=2 microbatches=4 schedule=gpipe", [False, False]),
        ("pipeline=3 microbatches=4 schedule=1f1b", [False, False, True]),
        ("pipeline=2 microbatches=4 schedule=zero-bubble", [False, True]),
        ("pipeline=2 microbatches=4 chunks=2 schedule=interleaved", [False, False, False, True]),
        ("pipeline=1-2 microbatches=4 schedule=1f1b", [False, True]),
    ],
)
def test_the_backward_pass_follows_at_once_where_each_microbatch_s_does(
    plan: str, at_once: list[bool]
) -> None:
    program = step_program(Plan.parse(plan), ties=False)
    assert [backward_follows(program, stage) for stage in range(program.stages)] == at_once
