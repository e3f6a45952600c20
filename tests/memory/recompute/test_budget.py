"""The choice of what to recompute within a budget, against every choice there is."""

import time
from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.memory.recompute.budget import (
    Choice,
    LayerCost,
    Segments,
    StageCosts,
    choose,
    evaluate,
    least_bytes,
    recomputed_bytes,
    uniform_choices,
)

BLOCK = LayerCost(saved=17, input=1, seconds=1.0, reused=1)


@st.composite
def layer_costs(draw: st.DrawFn) -> LayerCost:
    size, saved = draw(st.integers(1, 4)), draw(st.integers(0, 20))
    reused, shared = (draw(st.sampled_from([0, min(size, saved)])) for _ in range(2))
    return LayerCost(saved, size, draw(st.integers(1, 9)), reused, shared, draw(st.integers(0, 9)) > 0)


def stages(most_layers: int) -> st.SearchStrategy[StageCosts]:
    layers = st.lists(layer_costs(), min_size=1, max_size=most_layers).map(tuple)
    return st.builds(StageCosts, layers, st.integers(1, 4))


def all_segments(layers: tuple[LayerCost, ...]) -> Iterator[Segments]:
    """Every way to keep layers and to put the others into segments."""
    for words in product(("keep", "begin", "continue"), repeat=len(layers)):
        previous = ("keep", *words)
        wrong = any(
            (word == "continue" and before == "keep") or (word != "keep" and not layer.can_recompute)
            for before, word, layer in zip(previous, words, layers, strict=False)
        )
        if not wrong:
            begins = [index for index, word in enumerate(words) if word == "begin"]
            ends = [
                next((i for i in range(begin + 1, len(words)) if words[i] != "continue"), len(words))
                for begin in begins
            ]
            yield tuple(zip(begins, ends, strict=True))


def best_of_all(costs: list[StageCosts], budget: int) -> Choice | None:
    choices = (evaluate(costs, each) for each in product(*(all_segments(s.layers) for s in costs)))
    return min((c for c in choices if c.peak <= budget), key=lambda choice: choice.seconds, default=None)


@settings(deadline=None, max_examples=100)
@given(stages(most_layers=5), st.integers(1, 250))
def test_one_stage_recomputes_the_least_that_fits(stage: StageCosts, budget: int) -> None:
    choice, best = choose([stage], budget, levels=8 * 256), best_of_all([stage], budget)
    if best is None or choice is None:
        assert choice is best
        return
    assert choice.peak <= budget
    assert choice.seconds == best.seconds


@settings(deadline=None, max_examples=60)
@given(st.lists(stages(most_layers=3), min_size=2, max_size=2), st.integers(1, 250))
def test_stages_of_a_rank_share_its_budget(costs: list[StageCosts], budget: int) -> None:
    choice = choose(costs, budget)
    fitting = [uniform for uniform in uniform_choices(costs) if uniform.peak <= budget]
    if choice is None:
        assert not fitting
        return
    assert choice == evaluate(costs, choice.segments)
    assert choice.peak <= budget
    assert choice.seconds <= min((uniform.seconds for uniform in fitting), default=choice.seconds)


def test_the_peak_is_that_of_the_worst_moment() -> None:
    stage = StageCosts((BLOCK,) * 4, in_flight=3)
    assert evaluate([stage], [()]).peak == 3 * 4 * 17
    # Two inputs in each microbatch; computing the last two layers again takes 34 − 1 beside their input.
    assert evaluate([stage], [((0, 2), (2, 4))]) == Choice((((0, 2), (2, 4)),), 4.0, 3 * 2 + 33)
    # While the first layer is computed again, two microbatches have all, and one has let go of three layers.
    assert evaluate([stage], [((0, 1),)]).peak == max(3 * (1 + 51), 2 * (1 + 51) + 1 + 16)


def test_what_neighbours_share_is_counted_once() -> None:
    layers = (BLOCK, BLOCK._replace(shared=5))
    assert evaluate([StageCosts(layers, 1)], [()]).peak == 17 + 12
    assert evaluate([StageCosts(layers, 1)], [((0, 1),)]).peak == 1 + 17, "the first has dropped it"
    assert evaluate([StageCosts(layers, 1)], [((0, 2),)]).peak == 1 + 16 + 12


def test_what_a_backward_pass_has_let_go_of_makes_room() -> None:
    """Three kept layers and one that is computed again would be 68 bytes, but are never there at once."""
    choice = choose([StageCosts((BLOCK,) * 8, in_flight=1)], 60)
    assert choice is not None
    assert choice.seconds == 5.0


def test_a_choice_among_256_layers_takes_well_under_a_second() -> None:
    layers = tuple(BLOCK._replace(saved=17_000 + 37 * (i % 11), seconds=1 + i % 7 / 100) for i in range(256))
    stage = StageCosts(layers, in_flight=4)
    budget = evaluate([stage], [()]).peak // 3
    begin = time.process_time()
    choice = choose([stage], budget)
    assert time.process_time() - begin < 2.0, "0.4 s on a free machine"
    assert choice is not None
    assert 0.97 * budget < choice.peak <= budget
    assert choice.seconds < 0.75 * sum(layer.seconds for layer in layers)


@pytest.mark.parametrize("in_flight", [1, 4])
def test_the_least_budget_is_enough_and_hardly_more_than_needed(in_flight: int) -> None:
    costs = [StageCosts((BLOCK,) * 6, in_flight)]
    least = least_bytes(costs)
    assert choose(costs, least) is not None
    assert best_of_all(costs, round(0.9 * least)) is None


def test_a_layer_that_cannot_be_recomputed_is_kept() -> None:
    layers = (BLOCK, BLOCK, BLOCK._replace(can_recompute=False), BLOCK)
    choice = choose([StageCosts(layers, 1)], least_bytes([StageCosts(layers, 1)]))
    assert choice is not None
    assert 2 not in [index for begin, end in choice.segments[0] for index in range(begin, end)]


def test_nothing_is_recomputed_if_all_fits_to_the_last_byte() -> None:
    costs = [StageCosts((BLOCK,) * 4, in_flight=1)]
    assert choose(costs, 4 * 17) == evaluate(costs, [()])
    less = choose(costs, 4 * 17 - 1)
    assert less is not None
    assert (less.seconds, less.peak <= 4 * 17 - 1) == (1.0, True)


def test_a_budget_of_exactly_what_is_there_anyway() -> None:
    """Layers that save nothing fit into no bytes; what is fixed is no part of the choice."""
    empty = LayerCost(saved=0, input=0, seconds=1.0)
    assert choose([StageCosts((empty,) * 3, 1)], 0) == Choice(((),), 0.0, 0)
    stage = StageCosts((BLOCK,) * 3, in_flight=1, outside=100)
    assert choose([stage], 99) is None
    least = least_bytes([stage])
    choice = choose([stage], least)
    assert choice is not None
    assert 100 + 17 <= choice.peak <= least
    assert choose([stage], 117) is None, "an input and a layer of 16 beside another input"


@pytest.mark.parametrize("longest", [1, 2, 3])
def test_segments_have_so_many_layers_at_most(longest: int) -> None:
    costs = [StageCosts((BLOCK,) * 9, in_flight=4)]
    choice = choose(costs, 4 * 9 * 17 // 2, longest=longest)
    assert choice is not None
    assert {end - begin for begin, end in choice.segments[0]} <= set(range(1, longest + 1))
    many = [StageCosts((BLOCK,) * 9, in_flight=40)]
    assert (least_bytes(many, 1), least_bytes(many, 3) < 200) == (40 * 9 + 16, True)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_least_bytes_of_few_layers(layers: int) -> None:
    costs = [StageCosts((BLOCK,) * layers, in_flight=1)]
    best = min(evaluate(costs, [each]).peak for each in all_segments(costs[0].layers))
    assert best <= least_bytes(costs) <= best + 1


def test_of_equally_fast_choices_the_smaller_is_taken() -> None:
    large, small = BLOCK._replace(saved=40), BLOCK._replace(saved=30)
    choice = choose([StageCosts((small, large), in_flight=2)], 139)
    assert choice is not None
    assert choice.segments == (((0, 1),),), (
        "its bytes, 82, against 101: the last one is computed again beside all"
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
