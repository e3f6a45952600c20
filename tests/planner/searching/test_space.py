"""The plans that a search considers."""

from itertools import islice

import pytest

from echelon.plan import Plan
from echelon.planner.cluster.read import read_cluster
from echelon.planner.foresight.settings import Settings, settings_of
from echelon.planner.searching.space import layouts, most_sharded, plan_text, savers, shardings, smallest
from echelon.planner.shape.presets import preset_shape

LLAMA = preset_shape("llama3-8b")


def test_layouts_use_all_devices_and_divide_the_batch() -> None:
    found = list(layouts(LLAMA, read_cluster("h100:16"), 32, "bf16"))
    assert len(set(found)) == len(found) > 100
    for layout in found:
        assert layout.ranks == 16
        assert 32 % (layout.data * layout.microbatches) == 0
        assert LLAMA.kv_heads % layout.tensor == 0
    assert {layout.schedule for layout in found} == {"1f1b", "interleaved", "zero-bubble"}
    assert {layout.tensor for layout in found} == {1, 2, 4, 8}


def test_experts_divide_the_data_ranks() -> None:
    degrees = {
        layout.expert for layout in layouts(preset_shape("mixtral-8x7b"), read_cluster("h100:8"), 8, "bf16")
    }
    assert degrees == {1, 2, 4, 8}


def test_every_plan_of_a_small_search_is_one_that_the_engine_takes() -> None:
    cluster = read_cluster("h100:8")
    for layout in islice(layouts(LLAMA, cluster, 16, "bf16"), 0, None, 7):
        for sharded in shardings(layout, cluster.per_node):
            for variants in savers(sharded):
                for settings in variants:
                    assert plan_text(settings)
                    plan = Plan.parse(plan_text(settings))
                    assert plan.ranks == 8


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_the_text_of_a_plan_costs_what_was_predicted(precision: str) -> None:
    for layout in islice(layouts(LLAMA, read_cluster("h100:8"), 16, precision), 0, None, 5):
        read = settings_of(Plan.parse(plan_text(layout)))
        default = Settings().schedule if layout.pipeline == 1 else layout.schedule
        assert read._replace(schedule=default) == layout


def test_the_smallest_variant_has_every_saver() -> None:
    layout = Settings(data=8, zero=1)
    assert most_sharded(layout).zero == 3
    assert most_sharded(layout._replace(schedule="zero-bubble")).zero == 2
    assert most_sharded(Settings()).zero == 0
    assert smallest(layout).recompute == "full"
    assert smallest(layout).offload == {"optimizer", "activations"}


def test_shards_within_a_node() -> None:
    found = {(each.zero, each.shard) for each in shardings(Settings(data=32), per_node=8)}
    assert found == {(0, 0), (1, 0), (1, 8), (2, 0), (2, 8), (3, 0), (3, 8)}
    assert [each.zero for each in shardings(Settings(), per_node=8)] == [0]
