"""What layers of a rank keep and take, by hand."""

import pytest

from echelon.memory.recompute.budget_model import (
    Choice,
    LayerCost,
    StageCosts,
    evaluate,
    recomputed_bytes,
    uniform_choices,
)

PLAIN = LayerCost(10, 2, 1.0)


def stage(*layers: LayerCost, in_flight: int = 1, waiting: int = 0, outside: int = 0) -> StageCosts:
    return StageCosts(layers, in_flight, waiting, outside)


def test_what_a_layer_is_unless_it_is_told() -> None:
    assert LayerCost(10, 2, 1.0, 0, 0, True) == PLAIN
    assert StageCosts((), 1) == StageCosts((), 1, 0, 0)


def test_kept_layers_and_inputs_of_segments() -> None:
    three = stage(PLAIN, PLAIN, PLAIN)
    assert evaluate([three], [()]) == Choice(((),), 0.0, 30)
    # All inputs and 10; and when it is computed again, nothing is behind the last one.
    assert evaluate([three], [((0, 1), (1, 3))]).peak == max(2 + 2, 2 + 2 + 20)
    assert evaluate([three], [((0, 2),)]) == Choice((((0, 2),),), 2.0, max(2 + 10, 2 + 20))
    assert evaluate([three], [((2, 3),)]) == Choice((((2, 3),),), 1.0, 10 + 10 + 2 + 10)


def test_microbatches_in_flight_keep_as_much_each() -> None:
    busy = stage(PLAIN, PLAIN, PLAIN, in_flight=3)
    assert evaluate([busy], [()]).peak == 90
    # Of the one in its backward pass the layer behind the segment is gone.
    assert evaluate([busy], [((0, 2),)]).peak == 3 * (2 + 10) - 10 + 20


def test_what_neighbours_share_and_inputs_hold_is_counted_once() -> None:
    layer = LayerCost(10, 2, 1.0, reused=1, shared=3)
    assert recomputed_bytes([layer] * 3, 0, 1) == 10 - 1
    assert recomputed_bytes([layer] * 3, 0, 3) == 30 - 1 - 2 * 3
    assert recomputed_bytes([layer] * 3, 1, 3) == 20 - 1 - 3
    assert evaluate([stage(layer, layer, layer)], [()]).peak == 10 + 7 + 7
    assert evaluate([stage(layer, layer, layer)], [((1, 2),)]).peak == max(10 + 2 + 10, 10 + 2 + 9)
    assert evaluate([stage(layer, layer, layer)], [((0, 1),)]).peak == max(2 + 10 + 7, 2 + 9)


def test_what_is_there_whatever_is_chosen() -> None:
    halves = stage(PLAIN, PLAIN, in_flight=2, waiting=3, outside=5)
    assert halves.fixed_bytes == 3 * 20 + 5 * 5
    assert evaluate([halves], [()]).peak == 2 * 20 + 85
    assert evaluate([halves], [((0, 2),)]).peak == 2 * 2 + 85, "what is computed again is counted as waiting"


def test_stages_of_a_rank_are_added_up() -> None:
    both = [stage(PLAIN, in_flight=2), stage(PLAIN, PLAIN)]
    assert evaluate(both, [(), ()]).peak == 40
    assert evaluate(both, [((0, 1),), ()]) == Choice((((0, 1),), ()), 1.0, 2 * 2 + 20 + 10)


def test_segments_of_one_length() -> None:
    fixed = PLAIN._replace(can_recompute=False)
    found = [choice.segments[0] for choice in uniform_choices([stage(PLAIN, PLAIN, PLAIN, fixed, PLAIN)])]
    assert found == [
        (),
        ((0, 1), (1, 2), (2, 3), (4, 5)),
        ((0, 2), (2, 3), (4, 5)),
        *[((0, 3), (4, 5))] * 3,
    ]
    assert len(list(uniform_choices([stage(PLAIN, PLAIN, PLAIN)], longest=2))) == 3
    assert [choice.peak for choice in uniform_choices([stage()])] == [0]
    assert [choice.peak for choice in uniform_choices([])] == [0]


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_the_longest_of_several_stages_counts(layers: int) -> None:
    stages = [stage(PLAIN), stage(*[PLAIN] * layers)]
    assert len(list(uniform_choices(stages))) == 1 + layers
