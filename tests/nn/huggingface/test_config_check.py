"""Folders whose tensors fit a model, and whose config.json says that it is another one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from echelon.models import ModelConfig, build, save_hf
from echelon.nn.huggingface import config_json, open_weights, weight_layout
from echelon.state.weight_files.weight_folder import write_folder
from tests.nn.huggingface.models import KINDS, make

FIX = "; build the model from the folder's config"


def save(model: Any, folder: Path, **changes: Any) -> None:
    """The folder of a model, with other values in its config.json."""
    layout, state = weight_layout(model), model.state_dict()
    entries = layout.entries({name: tensor.dtype for name, tensor in state.items()})
    config = config_json(model, torch.float32) | changes
    write_folder(folder, entries, layout.joined(state.__getitem__), config, 2**20)


def errors_of(folder: Path, model: nn.Module) -> list[str]:
    return open_weights(folder, model).errors()


@pytest.mark.slow_cases(
    "bloom",
    "deepseek_v2",
    "falcon-groups",
    "falcon",
    "gemma2",
    "gemma3",
    "gemma",
    "gpt_neox",
    "mistral",
    "olmo2",
    "olmo",
    "phi3",
    "qwen2",
    "qwen3",
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_config_of_the_model_itself_fits(tmp_path: Path, kind: str) -> None:
    model: Any = make(kind)
    model.save_pretrained(tmp_path)
    assert errors_of(tmp_path, model) == []


@pytest.mark.parametrize(
    ("kind", "name", "stored", "own"),
    [
        ("llama", "rms_norm_eps", 1e-3, 1e-6),
        ("llama", "hidden_act", "gelu", "silu"),
        ("llama", "num_attention_heads", 8, 4),
        ("mistral", "sliding_window", 5, 3),
        ("mixtral", "num_experts_per_tok", 1, 2),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True, False),
    ],
)
def test_what_changes_the_output_is_an_error(
    tmp_path: Path, kind: str, name: str, stored: Any, own: Any
) -> None:
    model = make(kind)
    save(model, tmp_path, **{name: stored})
    assert f"config.json says {name}={stored!r}, the model has {own!r}{FIX}" in errors_of(tmp_path, model)


def test_rotary_positions_in_the_words_of_any_version(tmp_path: Path) -> None:
    """transformers 4 wrote `rope_theta`, with `rope_scaling` beside it; 5 writes `rope_parameters`."""
    model: Any = make("llama", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    save(model, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"]
    for theta, is_same in ((500000.0, True), (10000.0, False)):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_theta": theta, "rope_scaling": None}))
        errors = errors_of(tmp_path, model)
        assert (errors == []) == is_same
    (error,) = errors
    assert error.startswith("config.json says rope_parameters={'rope_theta': 10000.0")


def test_what_does_not_change_the_output_may_differ(tmp_path: Path) -> None:
    save(
        make("gpt2"),
        tmp_path,
        resid_pdrop=0.3,
        eos_token_id=7,
        use_cache=False,
        initializer_range=0.5,
        n_inner=64,
        dtype="bfloat16",
        architectures=["GPT2Model"],
        transformers_version="4.0.0",
        of_nobody=3,
    )
    assert errors_of(tmp_path, make("gpt2")) == []


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("rope", [None, DYNAMIC], ids=["plain", "dynamic"])
def test_the_longest_sequence_counts_where_positions_are_scaled_by_it(
    tmp_path: Path, rope: dict[str, Any] | None
) -> None:
    model = make("llama", rope_parameters=rope)
    save(model, tmp_path, max_position_embeddings=32)
    expected = f"config.json says max_position_embeddings=32, the model has 16{FIX}"
    assert errors_of(tmp_path, model) == ([] if rope is None else [expected])


def test_another_kind_of_model_and_configs_that_are_none(tmp_path: Path) -> None:
    model = make("llama")
    save(model, tmp_path, model_type="mistral")
    expected = f"config.json says model_type='mistral', the model has 'llama'{FIX}"
    assert errors_of(tmp_path, model) == [expected]
    save(model, tmp_path, hidden_size="wide")
    (error,) = errors_of(tmp_path, model)
    assert error.startswith("config.json: LlamaConfig cannot be made from it: ")
    assert "hidden_size" in error
    (tmp_path / "config.json").write_text("{")
    (error,) = errors_of(tmp_path, model)
    assert "config.json: is damaged" in error


def test_a_part_of_a_model_finds_its_part_of_the_config(tmp_path: Path) -> None:
    """A folder of pictures and text has the config of its text in `text_config`."""
    kind: Any = type("TextConfig", (transformers.LlamaConfig,), {"base_config_key": "text_config"})
    model: Any = make("llama")
    model.config = kind.from_dict(model.config.to_dict())
    save(model, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for epsilon, num_errors in ((raw["rms_norm_eps"], 0), (0.5, 1)):
        whole = {"model_type": "both", "text_config": raw | {"rms_norm_eps": epsilon}}
        (tmp_path / "config.json").write_text(json.dumps(whole))
        assert len(errors_of(tmp_path, model)) == num_errors


def test_a_folder_without_a_config_and_a_model_without_one_are_taken(tmp_path: Path) -> None:
    model = make("llama")
    save(model, tmp_path / "llama", rms_norm_eps=0.5)
    (tmp_path / "llama" / "config.json").unlink()
    assert errors_of(tmp_path / "llama", model) == []
    linear = nn.Linear(3, 2)
    save(linear, tmp_path / "linear", model_type="llama")
    assert errors_of(tmp_path / "linear", linear) == []


def test_models_of_echelon_compare_their_own(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"layers": 1, "width": 16, "heads": 4, "vocab": 17, "sequence": 8}
    save_hf(build(ModelConfig("llama", **sizes, rope_theta=500000.0)), tmp_path)
    assert errors_of(tmp_path, build(ModelConfig("llama", **sizes, rope_theta=500000.0))) == []
    assert errors_of(tmp_path, build(ModelConfig("llama", **sizes))) == [
        f"config.json says rope_theta=500000.0, the model has 10000.0{FIX}, read_hf_config(folder)"
    ]
    (tmp_path / "model.safetensors").write_bytes(b"")
    errors = errors_of(tmp_path, build(ModelConfig("llama", **sizes)))
    assert len(errors) == 2, "with those of the files"
