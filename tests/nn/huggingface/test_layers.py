"""Models of transformers as layers: the same numbers as their own forward. Nothing is downloaded."""

import pytest
import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.models import cross_entropy
from echelon.nn.huggingface.families import frequencies
from echelon.nn.huggingface.inputs import MASK
from echelon.nn.layering import listed_layers
from echelon.nn.sequence import View, assign
from echelon.nn.wrapping import Wrapping
from echelon.parallel.pipeline import even_boundaries, split_model
from echelon.planner import profile
from tests.nn.huggingface.models import KINDS, chained, double, tokens

ALL = sorted(KINDS)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.quick_cases(16)
@pytest.mark.slow_cases(
    "bloom-eager-False",
    "deepseek_v2-eager-False",
    "deepseek_v3-eager-False",
    "falcon-alibi-eager-False",
    "falcon-eager-False",
    "falcon-groups-eager-False",
    "gemma-eager-False",
    "gemma2-eager-False",
    "gemma3-eager-False",
    "gpt2-eager-False",
    "gpt_neox-eager-False",
    "llama-eager-False",
    "mistral-eager-False",
    "mixtral-eager-False",
    "olmo-eager-False",
    "olmo2-eager-False",
    "phi3-eager-False",
    "qwen2-eager-False",
    "qwen3-eager-False",
)
@pytest.mark.parametrize(("attention", "tied"), [("sdpa", True), ("sdpa", False), ("eager", False)])
@pytest.mark.parametrize("kind", ALL)
def test_the_layers_in_a_row_are_the_models_own_forward(kind: str, attention: str, tied: bool) -> None:
    model, (inputs, targets) = double(kind, attention, tie_word_embeddings=tied), tokens(0)
    own, ours = model(inputs), chained(model, inputs)
    assert type(ours) is type(own)
    assert own.logits.std() > 0.1
    assert torch.equal(ours.logits, own.logits)
    cross_entropy(own, targets)[0].backward()
    expected = gradients(model)
    cross_entropy(ours, targets)[0].backward()
    found = gradients(model)
    assert found.keys() == expected.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("kind", ALL)
def test_the_layers_hold_the_models_own_parts_and_nothing_else(kind: str) -> None:
    model = double(kind, tie_word_embeddings=True)
    layers = listed_layers(model)
    assert len(layers) == model.config.num_hidden_layers + 2
    assert {p for layer in layers for p in layer.parameters()} == set(model.parameters())
    buffers = {id(buffer) for layer in layers for buffer in layer.buffers()}
    assert buffers <= {id(buffer) for buffer in model.buffers()} - {id(each) for each in frequencies(model)}
    tied = set(layers[0].parameters()) & set(layers[-1].parameters())
    assert tied == {model.get_input_embeddings().weight}


def test_windows_are_seen() -> None:
    """The families with a window and without it differ: the tests above would not find a forgotten mask."""
    model, inputs = double("mistral"), tokens(0)[0]
    narrow = chained(model, inputs).logits
    model.config.sliding_window = None
    assert not torch.allclose(chained(model, inputs).logits[:, 3:], narrow[:, 3:])
    torch.testing.assert_close(chained(model, inputs).logits[:, :3], narrow[:, :3], rtol=0, atol=1e-12)


def test_gradient_checkpointing_of_transformers_stays_on() -> None:
    model, (inputs, targets) = double("llama").train(), tokens(0)
    cross_entropy(model(inputs), targets)[0].backward()
    expected = gradients(model)
    model.gradient_checkpointing_enable()
    cross_entropy(chained(model, inputs), targets)[0].backward()
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=1e-12)


def test_stages_keep_the_names_of_the_model() -> None:
    model = double("llama", tie_word_embeddings=True)
    stages, ties = split_model(model, even_boundaries(model, 2))
    assert [tie.name for tie in ties] == ["model.embed_tokens.weight"]
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert set(names) == dict(model.named_parameters()).keys()


def test_layers_are_measured() -> None:
    measured = profile(double("gpt2", tie_word_embeddings=True), tokens(0), repeats=1, warmups=0)
    assert len(measured.nodes) == 5


def test_more_tokens_than_positions_are_refused() -> None:
    inputs = torch.zeros(1, 17, dtype=torch.int64)
    with pytest.raises(UserError, match="17 tokens: this model has learned 16 positions"):
        chained(double("gpt2"), inputs)


@pytest.mark.parametrize("kind", ["bloom", "falcon-alibi", "falcon"])
def test_padding_is_seen_by_every_layer(kind: str) -> None:
    """Biases by distance are those of the tokens, not of the padding between them."""
    model, inputs = double(kind).eval(), tokens(0)[0]
    places = torch.arange(inputs.shape[1])
    mask = ((places == 0) | (places >= torch.tensor([[0], [2], [5], [0], [7]]))).long()
    view, value = View(), inputs
    view.shared = {MASK: mask}
    for layer in listed_layers(model):
        assign(layer, view, Wrapping())
        value = layer(value)
    own = model(inputs, attention_mask=mask).logits
    assert torch.equal(value.logits[mask.bool()], own[mask.bool()])
    assert not torch.allclose(own[mask.bool()], model(inputs).logits[mask.bool()])
