import sys

import pytest
import torch

from echelon.errors import UserError
from echelon.models import build, generate

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
    monkeypatch.setattr(sys.modules["echelon.models.generate"], "_draw", lambda *_: torch.tensor(next(draws)))
    written = generate(model_of(config), PROMPT[None].repeat(2, 1), 10, end=9)
    assert written[:, 3:].tolist() == [[3, 2, 4, 9], [1, 9, 9, 9]]
