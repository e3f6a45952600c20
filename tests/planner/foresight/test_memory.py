"""Bytes of one rank: states exactly, activations by what the plan keeps."""

from dataclasses import replace

import pytest

from echelon.planner.cluster.read import read_cluster
from echelon.planner.foresight.memory import (
    expert_copies,
    fixed_memory,
    head_bytes,
    layer_parameters,
    stage_parameters,
)
from echelon.planner.foresight.practice import ECHELON, MEGATRON
from echelon.planner.foresight.predict import forecast_of, predict
from echelon.planner.foresight.prediction import Memory
from echelon.planner.foresight.settings import Settings
from echelon.planner.foresight.stages import stage_kinds
from echelon.planner.shape.presets import preset_shape

LLAMA = preset_shape("llama3-8b")


@pytest.mark.parametrize(
    "name", ["gpt-small", "llama3-8b", "mixtral-8x7b", "deepseek-moe-16b", "qwen3-30b-a3b"]
)
@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_stages_have_all_parameters(name: str, pipeline: int) -> None:
    shape = preset_shape(name)
    counts = [
        kind.number * sum(stage_parameters(shape, Settings(pipeline=pipeline), kind))
        for kind in stage_kinds(shape, pipeline)
    ]
    twice = shape.vocab * shape.hidden if shape.tied and pipeline > 1 else 0  # on both ends
    assert sum(counts) == shape.num_parameters + twice


def test_norms_and_biases_of_rows_are_whole_on_each_tensor_rank() -> None:
    shape = preset_shape("gpt-small")
    h, f = shape.hidden, shape.ffn
    split = 4 * h * h + 3 * h + 2 * h * f + f  # matrices, and biases of columns
    whole = 4 * h + h + h  # norms, biases of rows
    assert layer_parameters(shape, 1, False) == split + whole
    assert layer_parameters(shape, 4, False) == split / 4 + whole


def test_experts_are_held_by_fewer_ranks() -> None:
    settings = Settings(data=64, tensor=2, expert=8, expert_tensor=2)
    assert expert_copies(settings) == 8
    assert expert_copies(settings._replace(expert_tensor=1)) == 16


def memory(words: str, batch: int = 16) -> Memory:
    return predict(LLAMA, f"precision=bf16 {words}", read_cluster("h200:8"), batch, 4096).memory[0]


def test_each_saver_saves_what_it_is_for() -> None:
    none = memory("data=2 microbatches=2")
    assert memory("data=2 microbatches=4").activations == none.activations / 2
    assert memory("data=2 microbatches=2 recompute=full").activations < none.activations / 8
    assert memory("data=2 microbatches=2 recompute=selective").activations < none.activations
    sqrt = memory("data=2 microbatches=2 recompute=sqrt")
    full = memory("data=2 microbatches=2 recompute=full")
    assert full.activations < sqrt.activations < none.activations  # a segment is made again, not a layer
    budget = memory("data=2 microbatches=2 recompute=budget:20GiB")
    assert 20 * 2**30 < budget.activations < none.activations
    gist = memory("data=2 microbatches=2 compress=gist-fp8")
    assert gist.activations == pytest.approx(none.activations / 2, rel=0.02)
    assert memory("data=2 microbatches=2 zero=1").optimizer == none.optimizer / 2
    assert memory("data=2 microbatches=2 gradients=same").gradients == none.gradients / 2
    assert memory("data=2 microbatches=2 masters=false").optimizer == none.optimizer * 2 / 3
    assert memory("data=2 update=backward").gradients < none.gradients / 4


def test_what_is_offloaded_is_on_the_host() -> None:
    none = memory("data=2 microbatches=2")
    for word, part in (("optimizer", none.optimizer), ("parameters", none.parameters)):
        offloaded = memory(f"data=2 microbatches=2 offload={word}")
        assert getattr(offloaded, word) == 0
        assert offloaded.host >= part
    offloaded = memory("data=2 microbatches=2 offload=activations")
    assert offloaded.activations + offloaded.host == pytest.approx(none.activations)
    assert offloaded.activations < none.activations / 8


def test_layers_are_gathered_with_zero_3() -> None:
    stage = stage_kinds(LLAMA, 1)[0]
    for zero in (0, 3):
        settings = Settings(data=8, zero=zero)
        parameters = stage_parameters(LLAMA, settings, stage)
        assert (fixed_memory(LLAMA, ECHELON, settings, stage, parameters).gathered > 0) == (zero == 3)


def test_logits_are_saved_unless_they_are_computed_with_their_loss() -> None:
    tokens, logits = 512, 512 * 2048
    shape = replace(LLAMA, vocab=2048, hidden=256)
    norm = 2 * 4 * tokens * 256
    whole = head_bytes(shape, ECHELON, Settings(precision="fp32"), tokens)
    assert whole.saved == norm + 4 * logits
    assert whole.peak == whole.saved + 4 * logits
    fused = head_bytes(shape, ECHELON, Settings(precision="bf16"), tokens)
    assert fused.saved == norm / 2
    split = head_bytes(shape, ECHELON, Settings(precision="fp32", tensor=2), tokens)
    assert split.saved == norm + 8 * logits / 2
    small = head_bytes(replace(shape, vocab=512), ECHELON, Settings(precision="bf16"), tokens)
    assert small.saved == norm / 2 + 6 * tokens * 512
    assert head_bytes(shape, MEGATRON, Settings(), tokens).saved == 0


def test_a_last_chunk_with_the_head_in_place_of_a_layer_keeps_one_microbatch() -> None:
    # Six layers in eight chunks, of which the first has the embedding and the last the head alone: the last
    # rank has one layer, in its first chunk, whose four microbatches run before the last chunk's first one.
    shape = replace(preset_shape("gpt-small"), layers=6)
    settings = Settings(pipeline=4, chunks=2, microbatches=8, schedule="interleaved")
    forecast = forecast_of(shape, read_cluster("h200:4"), MEGATRON)
    once = forecast.predict(settings._replace(chunks=1, schedule="1f1b"), 8).memory[-1]
    assert forecast.predict(settings, 8).memory[-1].activations == 4 * once.activations
