"""Shapes from config.json."""

import json
from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.models import preset
from echelon.models.hf.config import config_to_hf
from echelon.planner.shape.huggingface import read_shape, shape_from_config
from echelon.planner.shape.presets import preset_shape

DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "vocab_size": 129280, "max_position_embeddings": 163840, "head_dim": 128,
}  # fmt: skip


@pytest.mark.parametrize("name", ["gpt-small", "llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_models_that_echelon_writes_come_back_exactly(name: str) -> None:
    shape = shape_from_config(config_to_hf(preset(name), "bfloat16"), name)
    assert shape.num_parameters == preset(name).num_parameters


def test_other_models_are_read_by_their_usual_keys() -> None:
    shape = shape_from_config(DEEPSEEK, "v3")
    assert shape.num_parameters == preset_shape("deepseek-v3").num_parameters
    raw = {
        "model_type": "bert", "num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16,
        "intermediate_size": 4096, "vocab_size": 30522, "max_position_embeddings": 512,
    }  # fmt: skip
    bert = shape_from_config(raw)
    assert bert.bidirectional
    assert not bert.gated
    assert bert.num_parameters == pytest.approx(335e6, rel=0.01)
    assert shape.plain
    assert not bert.plain
    assert shape_from_config(raw | {"hidden_act": "gelu_new"}).plain


def test_experts_by_mixtrals_keys() -> None:
    raw = {
        "model_type": "phimoe", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
        "vocab_size": 100, "max_position_embeddings": 32, "intermediate_size": 96, "num_local_experts": 8,
    }  # fmt: skip
    experts = shape_from_config(raw).experts
    assert experts is not None
    assert (experts.number, experts.top_k, experts.hidden, experts.every) == (8, 2, 96, 1)


def test_missing_sizes_are_listed() -> None:
    with pytest.raises(UserError) as refusal:
        shape_from_config({"hidden_size": "wide"})
    assert len(refusal.value.errors) == 5


def test_a_file_a_folder_and_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(DEEPSEEK))
    assert read_shape(str(file)) == read_shape(str(tmp_path))
    assert read_shape("gpt-tiny").layers == 4
    file.write_text("[1]")
    with pytest.raises(UserError, match="has no keys"):
        read_shape(str(file))
    file.write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read_shape(str(file))
