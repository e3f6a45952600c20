"""A microbatch on a stage."""

from dataclasses import replace

import pytest

from echelon.plan import Plan
from echelon.planner.cluster.read import read_cluster
from echelon.planner.foresight.layer import layer_costs
from echelon.planner.foresight.passes import Pass, head_pass, stage_passes
from echelon.planner.foresight.practice import ECHELON, MEGATRON, TORCHTITAN, Practice
from echelon.planner.foresight.settings import Settings, settings_of
from echelon.planner.foresight.stages import StageKind
from echelon.planner.shape.presets import preset_shape

SHAPE = preset_shape("llama2-7b")
CLUSTER = read_cluster("h100:64")


def a_pass(settings: Settings, practice: Practice = ECHELON, head: bool = False) -> Pass:
    stage = StageKind(0, 1, 8, 0, False, head)
    costs = layer_costs(SHAPE, CLUSTER, practice, settings, 1)
    last = head_pass(SHAPE, CLUSTER, practice, settings, 1)
    return stage_passes(SHAPE, CLUSTER, practice, settings, [stage], costs, last)[0]


def test_parts_add_up() -> None:
    one = Pass(compute=1.0, tensor=2.0, hidden=5.0)
    assert one.total == 3.0
    assert one.plus(Pass(compute=1.0, weights=1.0), 2) == Pass(
        compute=3.0, tensor=2.0, hidden=5.0, weights=2.0
    )


def test_recomputing_repeats_the_forward_pass_and_its_messages() -> None:
    settings = Settings(tensor=4)
    none, full = a_pass(settings), a_pass(settings._replace(recompute="full"))
    assert none.recompute == 0
    assert none.compute / 4 < full.recompute < none.compute / 2
    assert full.tensor == 1.5 * none.tensor
    selective = a_pass(settings._replace(recompute="selective"))
    assert 0 < selective.recompute < full.recompute


def test_the_head_is_work_of_the_last_stage() -> None:
    assert a_pass(Settings(), head=True).compute > a_pass(Settings()).compute


def test_what_hides_is_not_exposed() -> None:
    settings = Settings(tensor=8, sequence=True)
    assert a_pass(settings, MEGATRON).tensor < a_pass(settings, ECHELON).tensor
    assert a_pass(settings, MEGATRON).hidden > 0


def test_sharded_weights_are_gathered_for_each_microbatch() -> None:
    settings = Settings(data=64, zero=3)
    gathered = a_pass(settings)
    assert gathered.data + gathered.hidden > 0
    assert a_pass(settings._replace(zero=1)).hidden == 0
    in_a_pipeline = settings._replace(pipeline=2, data=32)
    assert a_pass(in_a_pipeline, TORCHTITAN).data == 0
    assert a_pass(in_a_pipeline, TORCHTITAN).hidden == 0


def test_a_small_model_waits_for_its_host() -> None:
    tiny = preset_shape("llama-tiny")
    costs = layer_costs(tiny, CLUSTER, ECHELON, Settings(), 1)
    stage = StageKind(0, 1, 4, 0, False, False)
    waiting = stage_passes(tiny, CLUSTER, ECHELON, Settings(), [stage], costs, Pass())[0]
    assert waiting.host > waiting.compute
    compiled = stage_passes(tiny, CLUSTER, ECHELON, Settings(compiled=True), [stage], costs, Pass())[0]
    assert compiled.host < waiting.host


def test_copies_that_take_longer_than_the_work_are_exposed() -> None:
    assert a_pass(Settings(offload=frozenset({"activations"}))).offload > 0
    assert a_pass(Settings(offload=frozenset({"activations"}), recompute="full")).offload == 0
    assert a_pass(Settings(offload=frozenset({"parameters"}))).offload > 0


def test_a_head_that_is_fused_with_its_loss_pads_its_words_and_keeps_no_logits() -> None:
    cluster = read_cluster("h200:1")
    shape = preset_shape("gpt-small")
    bf16, fp32 = (settings_of(Plan.parse(f"precision={name}")) for name in ("bf16", "fp32"))
    odd, even = (
        head_pass(replace(shape, vocab=vocab), cluster, ECHELON, bf16, 8).compute for vocab in (50257, 50304)
    )
    assert odd == even
    other = replace(ECHELON, name="not fused", most_logits=0.0)
    assert odd < 0.6 * head_pass(shape, cluster, other, bf16, 8).compute
    assert head_pass(shape, cluster, ECHELON, fp32, 8) == head_pass(shape, cluster, other, fp32, 8)


def test_what_spread_experts_cost_beside_their_tokens() -> None:
    """Each forward pass says first how many tokens come, and those that came are sorted by expert."""
    shape, cluster = preset_shape("mixtral-8x7b"), read_cluster("h100:8")
    stage = StageKind(0, 1, 0, 1, False, False)

    def one(settings: Settings, practice: Practice = ECHELON) -> Pass:
        costs = layer_costs(shape, cluster, practice, settings, 1)
        return stage_passes(shape, cluster, practice, settings, [stage], costs, Pass())[0]

    unsorted = replace(ECHELON, name="does not sort", sorts_arrivals=False)
    spread = Settings(data=8, expert=8)
    counts = 2 * cluster.inside.latency
    assert one(spread).expert - one(spread, unsorted).expert == pytest.approx(counts, rel=1e-3)
    recorded = spread._replace(records_first=True)
    assert one(recorded).expert == pytest.approx(1.5 * one(spread).expert + counts / 2, rel=1e-3)
    assert one(spread).compute > one(spread, unsorted).compute
    whole = Settings(data=8)
    assert one(whole) == one(whole, unsorted)
