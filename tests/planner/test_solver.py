"""Both solvers on one level and on two, with answers that can be counted by hand."""

import math

from echelon.planner import Echelon, Node, PipeDream, chain
from echelon.planner.cost import StagePosition, make_levels
from echelon.planner.graph import find_states
from echelon.planner.solver import MemorySolver, Problem, TimeSolver


def layer(name: str, seconds: float, output: float = 0.0, parameters: float = 0.0) -> Node:
    return Node(name, seconds / 3, seconds * 2 / 3, output, parameters, stash_bytes=output)


PROFILE = chain([layer("a", 4.0, 1.0, 2.0), layer("b", 1.0, 1.0, 2.0), layer("c", 4.0, 1.0, 2.0)])


def problem(workers: tuple[int, ...], memory: float | None = None, straight: bool = False) -> Problem:
    levels = make_levels(workers, (1e9,) * len(workers))
    return Problem(find_states(PROFILE, 100), levels, Echelon(), memory, straight)


def test_the_least_time_and_the_split_that_has_it() -> None:
    straight = TimeSolver(problem((2,), straight=True))
    assert straight.best() == 5.0  # a b | c, or a | b c
    first, second = straight.split(5.0)
    assert (first.begin, first.end, first.position) == (0, 1, StagePosition(1, 1, 0.0))
    assert (second.begin, second.end, second.position) == (1, 3, StagePosition(1, 0, 0.0))
    replicated = TimeSolver(problem((2,)))
    assert replicated.best() == 4.5
    (stage,) = replicated.split(4.5)
    assert stage.position.replicas == 2


def test_a_level_above_splits_what_its_workers_split_again() -> None:
    solver = TimeSolver(problem((2, 2), straight=True))
    assert math.isinf(solver.best()), "4 workers and 3 layers"
    solver = TimeSolver(problem((1, 3), straight=True))
    assert solver.best() == 4.0
    pieces = solver.split(4.0)
    assert [(piece.begin, piece.end) for piece in pieces] == [(0, 1), (1, 2), (2, 3)]
    assert [[(inner.begin, inner.end) for inner in piece.inner] for piece in pieces] == [
        [(0, 1)],
        [(1, 2)],
        [(2, 3)],
    ]


def test_memory_forbids_stages_and_the_least_need_is_enough() -> None:
    needed = MemorySolver(problem((2,), memory=1.0)).best()
    assert math.isinf(TimeSolver(problem((2,), memory=needed - 0.5)).best())
    limited = TimeSolver(problem((2,), memory=needed))
    assert 4.5 <= limited.best() < math.inf
    assert MemorySolver(problem((3,), memory=1.0)).best() < needed, "more workers need less each"


def test_pipedream_pays_for_gradients_after_the_computation() -> None:
    levels = make_levels((2,), (1.0,))
    seconds = TimeSolver(Problem(find_states(PROFILE, 100), levels, PipeDream(), None, False)).best()
    assert seconds == 5.0  # replicated: (9 + 4 · 1 · 6 / 2) / 2 = 10.5; straight: 5
