"""The figures of each stage of a given split, by the formulas."""

from echelon.planner import Echelon, Node, PipeDream, chain
from echelon.planner.cluster import make_levels
from echelon.planner.cost import CostModel, StagePosition
from echelon.planner.partitioning import assess
from echelon.planner.solver import Piece, Problem
from echelon.planner.states import find_states

PROFILE = chain(
    [
        Node("a", 1.0, 3.0, output_bytes=10.0, parameter_bytes=100.0, stash_bytes=7.0),
        Node("b", 1.0, 1.0, output_bytes=20.0, parameter_bytes=200.0, stash_bytes=5.0),
        Node("c", 2.0, 4.0, output_bytes=30.0, parameter_bytes=300.0, stash_bytes=3.0),
    ]
)


def problem(workers: tuple[int, ...], bandwidths: tuple[float, ...], model: CostModel) -> Problem:
    return Problem(find_states(PROFILE, 100), make_levels(workers, bandwidths), model)


def test_two_stages_of_the_echelon_model() -> None:
    pieces = (
        Piece(0, 1, StagePosition(2, 1, 0.0), ()),
        Piece(1, 3, StagePosition(1, 0, 0.0), ()),
    )
    first, second = assess(problem((3,), (10.0,), Echelon()), PROFILE, pieces)
    assert (first.layers, first.replicas, first.workers) == (("a",), 2, (0, 1))
    assert (second.layers, second.replicas, second.workers) == (("b", "c"), 1, (2,))
    assert (first.compute_seconds, second.compute_seconds) == (4.0 / 2, 8.0)
    # A ring of 2 moves 2 · 1/2 · 100 bytes at 10 per second, once per update of 3 microbatches.
    assert first.gradient_seconds == 2 * (1 / 2) * 100 / 10 / 3
    assert second.gradient_seconds == 0.0
    # 10 bytes there and 10 back: by each of two senders every other one, by the receiver all.
    assert (first.activation_seconds, second.activation_seconds) == (2 * 10 / 10 / 2, 2 * 10 / 10)
    assert (first.limit, second.limit) == ("gradients", "compute")
    assert (first.seconds, second.seconds) == (first.gradient_seconds, 8.0)
    # Four copies of the weights; one microbatch of its own and ⌈1 / 2⌉ for the rank behind.
    assert first.memory_bytes == 4 * 100 + 2 * 7
    assert second.memory_bytes == 4 * 500 + 1 * (5 + 3 + 10)


def test_pipedream_charges_the_receiver_alone() -> None:
    pieces = (
        Piece(0, 1, StagePosition(1, 1, 0.0), ()),
        Piece(1, 3, StagePosition(1, 0, 0.0), ()),
    )
    first, second = assess(problem((2,), (1.0,), PipeDream()), PROFILE, pieces)
    assert (first.activation_seconds, second.activation_seconds) == (0.0, 20.0)
    assert (first.seconds, second.seconds, second.limit) == (4.0, 20.0, "activations")


def test_levels_become_flat_stages_with_their_workers() -> None:
    """Two machines of two workers: the first machine splits a | b, the second replicates c."""
    machine = StagePosition(1, 1, 0.0), StagePosition(1, 0, 0.0)
    pieces = (
        Piece(0, 2, machine[0], (Piece(0, 1, machine[0], ()), Piece(1, 2, machine[1], ()))),
        Piece(2, 3, machine[1], (Piece(2, 3, StagePosition(2, 0, 0.0), ()),)),
    )
    stages = assess(problem((2, 2), (1e9, 1e9), Echelon()), PROFILE, pieces)
    assert [stage.layers for stage in stages] == [("a",), ("b",), ("c",)]
    assert [stage.workers for stage in stages] == [(0,), (1,), (2, 3)]
    assert [stage.compute_seconds for stage in stages] == [4.0, 2.0, 3.0]
