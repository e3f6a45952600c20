"""The plans that a search considers."""

from collections.abc import Callable
from itertools import islice

import pytest

from echelon.plan import Plan
from echelon.planner.cluster.read import read_cluster
from echelon.planner.foresight.settings import Settings, settings_of
from echelon.planner.searching.request import Request
from echelon.planner.searching.space import layouts, most_sharded, plan_text, savers, shardings, smallest
from echelon.planner.shape.presets import preset_shape

BF16 = Request("precision=bf16")
LLAMA = preset_shape("llama3-8b")


def test_layouts_use_all_devices_and_divide_the_batch() -> None:
    found = list(layouts(LLAMA, read_cluster("h100:16"), 32, BF16))
    assert len(set(found)) == len(found) > 100
    for layout in found:
        assert layout.ranks == 16
        assert 32 % (layout.data * layout.microbatches) == 0
        assert LLAMA.kv_heads % layout.tensor == 0
    assert {layout.schedule for layout in found} == {"1f1b", "interleaved", "zero-bubble"}
    assert {layout.tensor for layout in found} == {1, 2, 4, 8}


def test_experts_divide_the_data_ranks() -> None:
    degrees = {
        layout.expert for layout in layouts(preset_shape("mixtral-8x7b"), read_cluster("h100:8"), 8, BF16)
    }
    assert degrees == {1, 2, 4, 8}


def test_every_plan_of_a_small_search_is_one_that_the_engine_takes() -> None:
    cluster = read_cluster("h100:8")
    for layout in islice(layouts(LLAMA, cluster, 16, BF16), 0, None, 7):
        for sharded in shardings(layout, cluster.per_node, BF16):
            for variants in savers(sharded, BF16):
                for settings in variants:
                    assert plan_text(settings, BF16.others)
                    plan = Plan.parse(plan_text(settings, BF16.others))
                    assert plan.ranks == 8


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_the_text_of_a_plan_costs_what_was_predicted(precision: str) -> None:
    request = Request(f"precision={precision}")
    for layout in islice(layouts(LLAMA, read_cluster("h100:8"), 16, request), 0, None, 5):
        read = settings_of(Plan.parse(plan_text(layout, request.others)))
        default = Settings().schedule if layout.pipeline == 1 else layout.schedule
        assert read._replace(schedule=default) == layout


def test_the_smallest_variant_has_every_saver() -> None:
    layout = Settings(data=8, zero=1)
    assert most_sharded(layout, BF16).zero == 3
    assert most_sharded(layout._replace(schedule="zero-bubble"), BF16).zero == 2
    assert most_sharded(Settings(), BF16).zero == 0
    assert smallest(layout, BF16).recompute == "full"
    assert smallest(layout, BF16).offload == {"optimizer", "activations"}


def test_shards_within_a_node() -> None:
    found = {(each.zero, each.shard) for each in shardings(Settings(data=32), per_node=8, request=BF16)}
    assert found == {(0, 0), (1, 0), (1, 8), (2, 0), (2, 8), (3, 0), (3, 8)}
    assert [each.zero for each in shardings(Settings(), per_node=8, request=BF16)] == [0]


def _plans(words: str, devices: str = "h100:8") -> list[Settings]:
    request, cluster = Request(words), read_cluster(devices)
    return [
        settings
        for layout in layouts(LLAMA, cluster, 16, request)
        for sharded in shardings(layout, cluster.per_node, request)
        for variants in savers(sharded, request)
        for settings in variants
    ]


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("tensor=2 zero=3", lambda each: (each.tensor, each.zero) == (2, 3)),
        ("pipeline=2 schedule=gpipe", lambda each: (each.pipeline, each.schedule) == (2, "gpipe")),
        ("chunks=4 recompute=sqrt", lambda each: (each.chunks, each.recompute) == (4, "sqrt")),
        ("offload=parameters data=8", lambda each: each.offload == {"parameters"} and each.data == 8),
        ("microbatches=2 sequence=false", lambda each: each.microbatches == 2 and not each.sequence),
        ("shard=2 zero=2", lambda each: (each.shard, each.zero) == (2, 2)),
    ],
)
def test_words_of_a_request_are_in_every_plan(words: str, kept: Callable[[Settings], bool]) -> None:
    plans = _plans(words)
    assert plans
    assert all(map(kept, plans))
    others = _plans("")
    assert not all(map(kept, others))


def test_a_request_leaves_out_nothing_that_has_its_words() -> None:
    everything = _plans("")
    assert set(_plans("tensor=2")) == {each for each in everything if each.tensor == 2}
    assert set(_plans("schedule=zero-bubble")) == {
        each for each in everything if each.schedule == "zero-bubble"
    }


def test_a_budget_and_other_words_stay_in_the_text() -> None:
    request = Request("precision=bf16 masters=false recompute=budget:1GiB tensor=1 pipeline=1")
    layout = next(iter(layouts(LLAMA, read_cluster("h100:2"), 4, request)))
    settings = next(iter(next(iter(savers(layout, request)))))
    plan = Plan.parse(plan_text(settings, request.others))
    assert (plan.masters, plan.recompute) == (False, f"budget:{2**30}")
    assert settings_of(plan)._replace(schedule=settings.schedule) == settings
