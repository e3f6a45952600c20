"""None"""

import copy
import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from echelon.errors import UserError
from echelon.models import GPT, Llama, ModelConfig, build, cross_entropy, generate


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


LOGITS = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([[1, 2, -100, 0, 6], [3, -100, -100, 5, 4]])


def test_total_and_count_leave_ignored_targets_out():
    total, count = cross_entropy(LOGITS, TARGETS)
    kept = TARGETS != -100
    chosen = LOGITS.log_softmax(-1)[kept].gather(1, TARGETS[kept][:, None])
    torch.testing.assert_close(total, -chosen.sum(), rtol=1e-14, atol=0)
    assert total.dtype == torch.float64
    assert count.item() == 7
    assert not count.is_floating_point()


def test_totals_and_counts_of_parts_add_up():
    parts = [cross_entropy(LOGITS[i : i + 1], TARGETS[i : i + 1]) for i in range(2)]
    total, count = cross_entropy(LOGITS, TARGETS)
    torch.testing.assert_close(parts[0][0] + parts[1][0], total, rtol=1e-14, atol=0)
    assert parts[0][1] + parts[1][1] == count
    assert parts[0][1] != parts[1][1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_types_are_summed_in_float32(dtype):
    low = LOGITS.to(dtype).requires_grad_()
    total, _ = cross_entropy(low, TARGETS)
    assert total.dtype == torch.float32
    exact, _ = cross_entropy(low.detach().double(), TARGETS)
    torch.testing.assert_close(total.detach().double(), exact, rtol=1e-6, atol=0)
    total.backward()
    assert low.grad.dtype == dtype


def test_nothing_counted_is_zero_and_has_zero_gradient():
    logits = LOGITS.clone().requires_grad_()
    total, count = cross_entropy(logits, torch.full_like(TARGETS, -100))
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    assert not logits.grad.any()


def test_bad_targets_are_all_listed():
    with pytest.raises(UserError) as caught:
        cross_entropy(LOGITS, TARGETS[:, :-1].int())
    assert "logits are [2, 5, 7], targets [2, 4]" in caught.value.errors[0]
    assert "targets.long()" in caught.value.errors[1]


def test_what_has_logits_is_taken_as_it_is():
    output = SimpleNamespace(logits=LOGITS, loss=None)
    assert cross_entropy(output, TARGETS) == cross_entropy(LOGITS, TARGETS)
    with pytest.raises(UserError, match="targets must have the shape"):
        cross_entropy(output, TARGETS[:1])


PROMPT = torch.tensor([5, 1, 30])


def model_of(config):
    torch.manual_seed(0)
    return build(config)


def test_prompt_comes_first_and_shape_follows_it(config):
    model = model_of(config)
    flat, batch = generate(model, PROMPT, 4), generate(model, PROMPT[None].repeat(2, 1), 4)
    assert flat.shape == (7,)
    assert batch.shape == (2, 7)
    assert torch.equal(flat[:3], PROMPT)
    assert torch.equal(generate(model, PROMPT, 0), PROMPT)


def test_seed_decides_and_the_global_one_is_not_touched(config):
    model = model_of(config)
    state = torch.get_rng_state()
    first = generate(model, PROMPT, 12, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(generate(model, PROMPT, 12, seed=1), first)
    assert not torch.equal(generate(model, PROMPT, 12, seed=2), first)


def test_longer_than_the_sequence_sees_the_last_tokens(config):
    model = model_of(config)
    size = config.sequence
    long = generate(model, PROMPT, size + 3, temperature=0)
    assert long.shape == (size + 6,)
    assert long[-1] == model(long[None, -size - 1 : -1])[0, -1].argmax()


def test_temperature_zero_and_top_one_take_the_likeliest(config):
    model = model_of(config)
    greedy = generate(model, PROMPT, 6, temperature=0)
    assert torch.equal(generate(model, PROMPT, 6, top_k=1, seed=7), greedy)
    for end in range(3, 9):
        assert greedy[end] == model(greedy[None, :end])[0, -1].argmax()


def test_draws_follow_temperature_and_top_k(config):
    """2000 first tokens: only the top 5 come, about as often as the sharpened probabilities say."""
    model = model_of(config)
    with torch.no_grad():
        model.embedding.tokens.weight.mul_(20)  # so that some tokens are clearly likelier
        logits = model(PROMPT[None])[0, -1].double()
    drawn = generate(model, PROMPT[None].repeat(2000, 1), 1, temperature=0.5, top_k=5)[:, -1]
    best = logits.topk(5)
    expected = torch.zeros(37, dtype=torch.float64).index_put((best.indices,), (best.values / 0.5).softmax(0))
    frequencies = torch.bincount(drawn, minlength=37) / 2000
    assert set(drawn.tolist()) <= set(best.indices.tolist())
    torch.testing.assert_close(frequencies.double(), expected, rtol=0, atol=0.04)


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_restored_also_after_an_error(config, training):
    model = model_of(config).train(training)
    seen = []
    handle = model.head.register_forward_hook(lambda *_: seen.append(model.training))
    generate(model, PROMPT, 1)
    assert seen == [False]
    handle.remove()
    model.head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model, PROMPT, 1)
    assert model.training is training


def test_bad_input_lists_all_errors(config):
    with pytest.raises(UserError) as caught:
        generate(model_of(config), torch.tensor([1.0, 99.0]), -1, temperature=-0.1, top_k=0)
    starts = [error.split(" ")[0].split("=")[0] for error in caught.value.errors]
    assert starts == ["prompt_tokens", "prompt_tokens", "length", "temperature", "top_k"]
    with pytest.raises(UserError, match="with at least one token"):
        generate(model_of(config), torch.tensor([], dtype=torch.int64), 1)


def test_rows_end_with_the_token_that_ends_a_text(config, monkeypatch):
    """The first row draws 3 2 4 5, the second 1 2: it is over, and filled up, until the first is too."""
    draws = iter([[[3], [1]], [[2], [9]], [[4], [2]], [[9], [7]]])
    monkeypatch.setattr(
        sys.modules["echelon.models.transformer"], "_draw", lambda *_: torch.tensor(next(draws))
    )
    written = generate(model_of(config), PROMPT[None].repeat(2, 1), 10, end=9)
    assert written[:, 3:].tolist() == [[3, 2, 4, 9], [1, 9, 9, 9]]
