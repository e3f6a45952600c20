"""Closed forms against the simulator of programs."""

import random

import pytest

from echelon.planner.foresight.schedules import kept_microbatches, step_seconds
from echelon.program import build, simulate
from echelon.program.simulate import Costs


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("stages", [2, 3, 4, 6])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8, 12])
def test_equal_stages_are_exact(schedule: str, stages: int, microbatches: int) -> None:
    costs = Costs(forward=1, backward=2, backward_input=1, backward_weight=1)
    simulated = simulate(build(schedule, (1,) * stages, microbatches), costs)
    assert step_seconds(schedule, [3] * stages, microbatches, weights=1) == pytest.approx(simulated.makespan)
    kept = [kept_microbatches(schedule, stages, stage, microbatches) for stage in range(stages)]
    assert kept == list(simulated.in_flight)


@pytest.mark.parametrize(
    ("stages", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 8), (2, 4, 2), (4, 2, 4)]
)
def test_interleaved_stages_are_exact(stages: int, chunks: int, microbatches: int) -> None:
    program = build("interleaved", (1,) * stages, microbatches, chunks=chunks)
    simulated = simulate(program, Costs(forward=1, backward=2))
    assert step_seconds("interleaved", [3 * chunks] * stages, microbatches, chunks) == simulated.makespan
    kept = [
        chunks * kept_microbatches("interleaved", stages, stage, microbatches, chunks)
        for stage in range(stages)
    ]
    assert kept == list(simulated.in_flight)


@pytest.mark.parametrize("seed", range(12))
def test_unequal_stages_are_within_a_few_percent(seed: int) -> None:
    draw = random.Random(seed)
    forwards = [draw.randint(1, 5) for _ in range(4)]
    microbatches = draw.choice((4, 8, 16))
    costs = Costs(forward=forwards, backward=[2 * each for each in forwards])
    simulated = simulate(build("1f1b", (1,) * 4, microbatches), costs)
    predicted = step_seconds("1f1b", [3 * each for each in forwards], microbatches)
    assert predicted == pytest.approx(simulated.makespan, rel=0.05)


def test_pipelines_that_never_drain_have_no_bubble() -> None:
    assert step_seconds("pipedream", [1.0, 2.0], 8) == 16
    assert [kept_microbatches("pipedream", 3, stage, 1) for stage in range(3)] == [3, 2, 1]
