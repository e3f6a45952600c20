"""Sizes of models."""

from dataclasses import replace

import pytest

from echelon.errors import UserError
from echelon.planner.shape.presets import preset_shape
from echelon.planner.shape.shape import Experts, ModelShape

LLAMA = preset_shape("llama3-8b")


def test_a_step_computes_six_operations_per_parameter_and_token_and_scores() -> None:
    tokens = 1000.0
    matrices = LLAMA.num_parameters - LLAMA.embedding_parameters - 65 * LLAMA.hidden  # without norms
    scores = 3 * LLAMA.layers * LLAMA.score_flops(8192)
    assert LLAMA.step_flops(8192, tokens) == pytest.approx(tokens * (6 * matrices + scores))


def test_causal_attention_computes_half_of_the_scores() -> None:
    both = replace(LLAMA, bidirectional=True)
    assert both.score_flops(4096) == 2 * LLAMA.score_flops(4096) == 4 * 4096 * LLAMA.query_width


def test_latent_attention_has_the_published_parameters() -> None:
    shape = preset_shape("deepseek-v3")
    assert shape.num_parameters == pytest.approx(671e9, rel=0.001)
    assert shape.num_active_parameters == pytest.approx(37e9, rel=0.03)
    assert shape.sparse_layers == 58


def test_only_chosen_experts_compute() -> None:
    shape = preset_shape("mixtral-8x7b")
    routed = [times for _, times in shape.products(sparse=True) if times > 1]
    assert routed == [2, 2]
    assert shape.num_active_parameters < shape.num_parameters / 3


def test_experts_may_be_in_every_other_layer() -> None:
    shape = replace(LLAMA, layers=8, experts=Experts(4, 2, 128, first_dense=2, every=2))
    assert [shape.has_experts(layer) for layer in range(8)] == [
        False,
        False,
        True,
        False,
        True,
        False,
        True,
        False,
    ]


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="kv_heads=3"):
        replace(LLAMA, kv_heads=3)
    with pytest.raises(UserError) as refusal:
        ModelShape("bad", 0, 0, 1, 1, 1, kv_heads=1, ffn=-1, head_width=1)
    assert len(refusal.value.errors) == 3
    with pytest.raises(UserError, match="top_k=3"):
        Experts(2, 3, 8)
