"""None"""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from echelon.errors import UserError
from echelon.models import GPT, Llama, ModelConfig, build


def built(config, seed=0):
    torch.manual_seed(seed)
    return build(config)


def test_layers_are_embedding_blocks_head_and_compose_to_forward(config, tokens):
    model = built(config)
    layers = model.layers()
    assert len(layers) == config.layers + 2
    assert layers[0] is model.embedding
    assert layers[-1] is model.head
    x = tokens
    for layer in layers:
        x = layer(x)
        assert isinstance(x, torch.Tensor)
    assert x.shape == (2, 24, config.vocab)
    assert torch.equal(x, model(tokens))


def test_layers_hold_every_parameter_and_there_are_no_buffers(config):
    model = built(config)
    in_layers = {id(p) for layer in model.layers() for p in layer.parameters()}
    assert in_layers == {id(p) for p in model.parameters()}
    assert list(model.buffers()) == []


def test_same_seed_same_bits_and_another_seed_others(config):
    first, again, other = (
        built(config).state_dict(),
        built(config).state_dict(),
        built(config, 1).state_dict(),
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.0.attention.query.weight"], other["blocks.0.attention.query.weight"])


def test_a_token_does_not_see_later_ones(config, tokens):
    model = built(config).double()
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % config.vocab
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=1e-14)
    assert (before[:, 10:] - after[:, 10:]).abs().max() > 1e-4


def test_order_of_tokens_matters(config, tokens):
    """A model without positions would give the last token the same logits whatever order came before."""
    torch.manual_seed(0)
    model = build(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    swapped = tokens[:, [1, 0, *range(2, 24)]]
    assert (model(tokens)[:, -1] - model(swapped)[:, -1]).abs().max() > 1e-6


def test_float64_is_not_rounded_to_float32_on_the_way(config, tokens):
    """A cast down anywhere would leave a trace of about 1e-7 between float64 and a higher truth.

    The truth is the derivative: in float64 a central difference with a step of 1e-5 agrees with autograd
    to 1e-6 of its size, and with any float32 inside it would be noise of 1e-2.
    """
    model = built(config).double()
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}

    def moved(step: float) -> torch.Tensor:
        state = {name: p.detach() + step * direction[name] for name, p in model.named_parameters()}
        return torch.func.functional_call(model, state, (tokens,), tie_weights=True).logsumexp(-1).sum()

    model(tokens).logsumexp(-1).sum().backward()
    slope = sum((p.grad * direction[name]).sum() for name, p in model.named_parameters())
    difference = (moved(1e-5) - moved(-1e-5)) / 2e-5
    torch.testing.assert_close(difference, slope, rtol=1e-6, atol=0)


def test_bfloat16_is_near_float64(config, tokens):
    model = built(config)
    low = copy.deepcopy(model).bfloat16()(tokens)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), model.double()(tokens), rtol=0, atol=0.02)


def test_tied_head_is_the_embedding(config):
    model = built(config)
    assert (model.head.projection.weight is model.embedding.tokens.weight) == config.tied


def test_meta_model_filled_and_reset_equals_the_built_one(config):
    with torch.device("meta"):
        model = build(config)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    expected = built(config).state_dict()
    assert (model.head.projection.weight is model.embedding.tokens.weight) == config.tied
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.slow_cases("gpt-tied", "llama")
def test_dropout_stands_after_embedding_attention_and_feed_forward(config, tokens):
    model = built(dataclasses.replace(config, dropout=0.3))
    dropping = {name for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    parts = ("attention_dropout", "mlp_dropout")
    assert dropping == {"embedding.dropout", *(f"blocks.{i}.{part}" for i in range(2) for part in parts)}
    for name in dropping:
        changed = built(config)
        module = changed.get_submodule(name)
        module.p = 0.5
        assert not torch.equal(changed(tokens), built(config)(tokens)), name
    assert torch.equal(model.eval()(tokens), built(config)(tokens))
    assert model.state_dict().keys() == built(config).state_dict().keys()


SMALL_GPT = ModelConfig("gpt", layers=2, width=16, heads=4, vocab=37, sequence=24)


def test_names_of_parameters_of_gpt():
    parts = ["attention.query", "attention.key", "attention.value", "attention.output", "mlp.up", "mlp.down"]
    block = {
        f"{part}.{kind}" for part in [*parts, "attention_norm", "mlp_norm"] for kind in ("weight", "bias")
    }
    names = {f"blocks.{i}.{name}" for i in range(2) for name in block}
    names |= {"embedding.tokens.weight", "embedding.positions.weight"}
    names |= {"head.norm.weight", "head.norm.bias", "head.projection.weight"}
    assert {name for name, _ in GPT(SMALL_GPT).named_parameters()} == names


def test_too_long_a_sequence_is_refused():
    with pytest.raises(UserError, match="a sequence of 25 tokens: this GPT has learned 24 positions"):
        GPT(SMALL_GPT)(torch.zeros(1, 25, dtype=torch.int64))


def test_gpt_refuses_a_config_of_another_family():
    with pytest.raises(UserError, match="family 'llama'"):
        GPT(ModelConfig("llama", layers=1, width=16, heads=4, vocab=37, sequence=24))


SMALL_LLAMA = ModelConfig("llama", layers=2, width=32, heads=4, kv_heads=2, ffn=40, vocab=37, sequence=24)


def test_names_of_parameters_of_llama():
    parts = ["query", "key", "value", "output"]
    block = [f"attention.{part}" for part in parts] + ["mlp.gate", "mlp.up", "mlp.down"]
    names = {f"blocks.{i}.{part}.weight" for i in range(2) for part in [*block, "attention_norm", "mlp_norm"]}
    names |= {"embedding.tokens.weight", "head.norm.weight", "head.projection.weight"}
    assert {name for name, _ in Llama(SMALL_LLAMA).named_parameters()} == names


def test_grouped_keys_and_values_are_narrow():
    attention = Llama(SMALL_LLAMA).blocks[0].attention
    assert [tuple(p.weight.shape) for p in (attention.query, attention.key, attention.value)] == [
        (32, 32),
        (16, 32),
        (16, 32),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_norm_sums_in_float32_at_least(dtype):
    """16-bit sums of 256 squares lose the smaller ones; float64 must not pass through float32."""
    wide = ModelConfig("llama", layers=1, width=256, heads=4, ffn=40, vocab=37, sequence=24)
    norm = Llama(wide).head.norm.to(dtype)
    x = (torch.randn(8, 256, dtype=torch.float64) * 3).to(dtype)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + wide.norm_epsilon).rsqrt()
    error = (norm(x).double() - exact).abs().max().item()
    assert error < (1e-14 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps)


def test_llama_refuses_a_config_of_another_family():
    with pytest.raises(UserError, match="family 'gpt'"):
        Llama(ModelConfig("gpt", layers=1, width=16, heads=4, vocab=37, sequence=24))
