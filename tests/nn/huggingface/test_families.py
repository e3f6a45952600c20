"""Which models of transformers list layers, and why others do not."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers

from echelon.collectives.mesh import Mesh
from echelon.engine import parallelize
from echelon.errors import UserError
from echelon.models import cross_entropy
from echelon.nn.layering import how_to_list, listed_layers
from echelon.nn.wrapping import Wrapping
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.pipeline import even_boundaries
from echelon.plan import Plan
from tests.cases import adamw
from tests.nn.huggingface.models import VOCAB, double, make


def test_frequencies_of_positions_keep_their_digits_in_low_precision() -> None:
    model = make("llama")
    before = model.model.rotary_emb.inv_freq.clone()
    parallelize(model, "precision=bf16", optimizer=adamw, loss=cross_entropy)
    assert model.model.norm.weight.dtype == torch.bfloat16
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


class Own(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Renamed(transformers.LlamaForCausalLM):
    pass


def test_a_subclass_is_known_unless_it_has_a_forward_of_its_own() -> None:
    config = double("llama").config
    assert len(listed_layers(Renamed(config))) == 5
    assert listed_layers(Own(config)) == []


def test_other_architectures_list_no_layers_and_are_refused_with_the_ones_that_do() -> None:
    config = transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        word_embed_proj_dim=16,
    )
    model = transformers.OPTForCausalLM(config)
    assert listed_layers(model) == []
    with pytest.raises(UserError, match=r"OPTForCausalLM lists no layers.*LlamaForCausalLM, Qwen2"):
        even_boundaries(model, 2)


@pytest.mark.parametrize("name", ["output_router_logits", "output_hidden_states"])
def test_what_needs_all_layers_in_one_place_is_refused_by_pipelines(name: str) -> None:
    model = double("mixtral", **{name: True})
    with pytest.raises(UserError, match=f"asks for {name}.*set model.config.{name} = False"):
        even_boundaries(model, 2)
    setattr(model.config, name, False)
    assert how_to_list(model) == ""
    assert even_boundaries(model, 2) == [3]


def test_hooks_on_the_model_are_refused_where_its_forward_is_not_called() -> None:
    model = double("llama")
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(UserError, match="forward hooks"):
        parallelize(model, "zero=1", optimizer=adamw, loss=cross_entropy)


@pytest.mark.parametrize("name", ["model", "model.embed_tokens", "model.rotary_emb"])
def test_hooks_inside_the_model_are_refused_where_they_would_not_run(name: str) -> None:
    """Those of a trunk were silently left out."""
    model = double("llama")
    model.get_submodule(name).register_forward_hook(lambda *_: None)
    if name == "model":
        with pytest.raises(UserError, match="forward hooks of model: "):
            parallelize(model, "zero=1", optimizer=adamw, loss=cross_entropy)
    else:
        parallelize(model, "zero=1", optimizer=adamw, loss=cross_entropy)


@pytest.mark.parametrize("name", ["", "model"])
def test_a_forward_that_was_replaced_lists_no_layers(name: str) -> None:
    model = double("llama")
    module = model.get_submodule(name)
    module.forward = module.forward
    assert listed_layers(model) == []
    with pytest.raises(UserError, match=f"its {name}{'.' * bool(name)}forward is not that of transformers"):
        even_boundaries(model, 2)


def test_a_model_that_returns_all_layers_is_refused_with_the_fix() -> None:
    """With context=2 the message was to make it an nn.Sequential."""
    model = double("llama", output_hidden_states=True)
    with pytest.raises(UserError, match=r"set model\.config\.output_hidden_states = False"):
        LayerSharding(model, Mesh.pretend(Plan(context=2), 0), cross_entropy, None, Wrapping())


def test_transformers_is_not_needed() -> None:
    code = (
        "import sys, echelon.models, echelon.nn.layering as l, echelon.nn.dropout.modules as d; "
        "from torch import nn; "
        "assert l.listed_layers(nn.Linear(2, 2)) == d.unkeyed_dropout(nn.Linear(2, 2)) == []; "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
