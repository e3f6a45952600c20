"""Folders of transformers, read and written without a whole model; transformers itself is the reference."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.core_model_loading import Chunk, WeightConverter

from echelon.errors import UserError
from echelon.models import build
from echelon.nn.huggingface import config_json, open_weights, weight_layout
from echelon.state.ownership import run_slices
from echelon.state.weight_files.weight_folder import write_folder
from tests.nn.huggingface.models import KINDS, make

transformers.logging.disable_progress_bar()
TOKENS = torch.arange(16).view(2, 8)
FILE = "model.safetensors"

by_kind = pytest.mark.parametrize("kind", KINDS)


def empty(model: Any) -> nn.Module:
    """The same model without memory."""
    with torch.device("meta"):
        made: nn.Module = transformers.AutoModelForCausalLM.from_config(model.config)
    return made


def assert_reads(folder: Path, model: nn.Module) -> None:
    """Both halves of every tensor are the model's."""
    weights = open_weights(folder, empty(model))
    assert weights.errors() == []
    for name, tensor in model.state_dict().items():
        half = min(tensor.numel() // 2 + 3, tensor.numel())
        boxes = [
            box
            for begin, end in ((0, half), (half, tensor.numel()))
            for box in run_slices(name, tuple(tensor.shape), begin, end)
        ]
        read = torch.cat([part.flatten() for part in weights.read(name, boxes)])
        assert torch.equal(read, tensor.flatten()), name


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Replace or remove tensors of a folder."""
    state = load_file(folder / FILE) | tensors
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, folder / FILE)


def write(model: Any, folder: Path) -> None:
    layout, state = weight_layout(model), model.state_dict()
    entries = layout.entries({name: tensor.dtype for name, tensor in state.items()})
    write_folder(folder, entries, layout.joined(state.__getitem__), config_json(model, model.dtype), 5000)


@pytest.mark.quick_cases(9)
@pytest.mark.slow_cases(
    "False-bloom",
    "False-deepseek_v2",
    "False-falcon-alibi",
    "False-falcon-groups",
    "False-gemma2",
    "False-gemma3",
    "False-gemma",
    "False-gpt_neox",
    "False-mistral",
    "False-mixtral",
    "False-olmo2",
    "False-olmo",
    "False-phi3",
    "False-qwen2",
    "False-qwen3",
)
@by_kind
@pytest.mark.parametrize("is_tied", [False, True])
def test_what_transformers_saved_is_read_in_parts(tmp_path: Path, kind: str, is_tied: bool) -> None:
    model = make(kind, tie_word_embeddings=is_tied)
    model.save_pretrained(tmp_path)
    assert_reads(tmp_path, model)


@pytest.mark.quick_cases(9)
@pytest.mark.slow_cases(
    "False-bloom",
    "False-deepseek_v2",
    "False-falcon-alibi",
    "False-falcon-groups",
    "False-falcon",
    "False-gemma2",
    "False-gemma3",
    "False-gemma",
    "False-gpt_neox",
    "False-mistral",
    "False-mixtral",
    "False-olmo2",
    "False-olmo",
    "False-phi3",
    "False-qwen2",
    "False-qwen3",
)
@by_kind
@pytest.mark.parametrize("is_tied", [False, True])
def test_transformers_loads_what_was_written(tmp_path: Path, kind: str, is_tied: bool) -> None:
    model = make(kind, tie_word_embeddings=is_tied).eval()
    write(model, tmp_path / "ours")
    # Grouped matrix products take no matrices as small as these.
    options = {"experts_implementation": "eager"} if kind.startswith("deepseek") else {}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", **options).eval()
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    model.save_pretrained(tmp_path / "theirs")
    assert {*load_file(tmp_path / "theirs" / FILE)} == {*weight_layout(model).tensors}


def test_transformers_loads_the_type_that_was_written(tmp_path: Path) -> None:
    model = make("llama").bfloat16()
    write(model, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_experts_that_are_stored_as_the_model_has_them(tmp_path: Path) -> None:
    model = make("mixtral")
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / FILE)
    assert_reads(tmp_path, model)


def test_more_than_ten_experts(tmp_path: Path) -> None:
    """As text, 10 comes before 2."""
    model = make("mixtral", num_local_experts=12, num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    assert_reads(tmp_path, model)


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    model = make("mixtral")
    model.save_pretrained(tmp_path)
    change(tmp_path, **{"model.layers.1.block_sparse_moe.experts.2.w3.weight": None})
    assert open_weights(tmp_path, empty(model)).errors() == [
        "model.layers.1.mlp.experts.gate_up_proj: 3 tensors of the files "
        "(model.layers.1.block_sparse_moe.experts.0.w3.weight, …) are stacked in it, must be 4",
    ]


def test_an_expert_of_another_shape_or_type(tmp_path: Path) -> None:
    model = make("mixtral")
    model.save_pretrained(tmp_path)
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    change(tmp_path, **{name: torch.zeros(23, 16).half()})
    errors = open_weights(tmp_path, empty(model)).errors()
    assert errors[0] == f"{name}: has shape [23, 16], must be [24, 16]"
    assert "gate_up_proj: its parts in the files are of several types" in errors[1]


def test_files_of_the_bare_model_and_the_bare_model_of_files(tmp_path: Path) -> None:
    model: Any = make("llama", tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path / "bare")
    assert "embed_tokens.weight" in load_file(tmp_path / "bare" / FILE)
    assert_reads(tmp_path / "bare", model)
    model.save_pretrained(tmp_path / "whole")
    weights = open_weights(tmp_path / "whole", model.model)
    assert weights.errors() == []
    assert {*weights.names()} == {*model.model.state_dict()}


def test_older_names_are_read(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=17, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12
    )
    model = transformers.BertModel(config)
    state = {n: nn.init.normal_(t.clone()) for n, t in model.state_dict().items()}
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for n, t in state.items()
    }
    assert old.keys() != state.keys()
    save_file(old, tmp_path / FILE)
    weights = open_weights(tmp_path, model)
    assert weights.errors() == []
    name = "embeddings.LayerNorm.weight"
    (read,) = weights.read(name, run_slices(name, (8,), 2, 7))
    assert torch.equal(read, state[name][2:7])


def test_a_model_that_lost_its_tie_reads_the_tensor_that_is_stored(tmp_path: Path) -> None:
    """`to_empty` gives tied parameters memory of their own."""
    model = make("gpt2", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    untied = empty(model).to_empty(device="cpu")
    untied.lm_head.weight = nn.Parameter(torch.zeros(17, 16))  # type: ignore[union-attr]
    weights = open_weights(tmp_path, untied)
    assert weights.errors() == []
    boxes = run_slices("lm_head.weight", (17, 16), 16, 48)
    (read,) = weights.read("lm_head.weight", boxes)
    assert torch.equal(read, model.state_dict()["lm_head.weight"][1:3])


def test_constants_of_older_files_are_not_read(tmp_path: Path) -> None:
    model = make("llama")
    model.save_pretrained(tmp_path)
    change(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    assert open_weights(tmp_path, empty(model)).errors() == []


def test_all_errors_at_once(tmp_path: Path) -> None:
    model = make("llama")
    model.save_pretrained(tmp_path)
    change(
        tmp_path,
        **{
            "lm_head.weight": None,
            "model.norm.weight": torch.zeros(15),
            "model.layers.0.mlp.up_proj.weight": torch.zeros(24, 16, dtype=torch.int8),
            "stranger": torch.zeros(1),
        },
    )
    assert open_weights(tmp_path, empty(model)).errors() == [
        "lm_head.weight: is missing",
        "stranger: is not a tensor of this model",
        "model.layers.0.mlp.up_proj.weight: is torch.int8, must be floating point (quantised weights are not "
        "read)",
        "model.norm.weight: has shape [15], must be [16]",
    ]


def test_other_conversions_are_refused_by_name_and_such_models_written_under_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if Llama's files had two matrices in one, which transformers splits."""
    two = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    split = WeightConverter("mlp.fused.weight", two, [Chunk(dim=0)])
    conversions = import_module("transformers.conversion_mapping")
    monkeypatch.setattr(conversions, "get_model_conversion_mapping", lambda _: [split])
    model = make("llama")
    state = model.state_dict()
    halves = [state.pop(f"model.layers.0.{half}") for half in two]
    save_file(state | {"model.layers.0.mlp.fused.weight": torch.cat(halves)}, tmp_path / FILE)
    assert open_weights(tmp_path, empty(model)).errors() == [
        "2 tensors (model.layers.0.mlp.gate_proj.weight, …): transformers makes them by Chunk, which is not "
        "supported here; load the model with from_pretrained",
    ]
    assert {*weight_layout(model).tensors} == {*model.state_dict()}


def test_an_older_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    with pytest.raises(UserError, match=r"install transformers>=5\.22"):
        weight_layout(make("llama"))


def test_models_of_echelon_and_any_other(tmp_path: Path) -> None:
    gpt = build("gpt-tiny")
    assert "transformer.wpe.weight" in weight_layout(gpt).tensors
    assert config_json(gpt, torch.bfloat16)["torch_dtype"] == "bfloat16"
    linear = nn.Linear(3, 2)
    assert list(weight_layout(linear).tensors) == ["weight", "bias"]
    assert config_json(linear, torch.float32) == {"architectures": ["Linear"]}
    save_file(linear.state_dict(), tmp_path / FILE)
    assert open_weights(tmp_path, linear).errors() == []
