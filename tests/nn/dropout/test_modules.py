"""Keyed modules: torch's semantics, masks by position in the training, and nothing else changed."""

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.nn.dropout.modules import (
    KeyedDropout,
    key_dropout,
    keyed_modules,
    set_global_indices,
    split_features,
    unkeyed_dropout,
)
from echelon.nn.dropout.training_position import current, restore, scope
from echelon.nn.wrapping import Wrapping, find_wrapper
from tests.nn.dropout.masks import keep_mask

DOUBLE = torch.float64


def keyed(*layers: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*layers)
    key_dropout(model, Wrapping())
    return model


def key_of(module: nn.Module) -> int:
    wrapper = find_wrapper(module, KeyedDropout)
    assert wrapper is not None
    return wrapper.layer


def run(model: nn.Module, x: Tensor, first: int = 0, step: int = 0, seed: int = 0) -> Tensor:
    with scope(seed=seed, step=step, first_sample=first):
        output: Tensor = model(x)
    return output


def test_the_result_is_the_mask_over_one_minus_p() -> None:
    model = keyed(nn.Dropout(0.3))
    x = torch.randn(6, 5, 4, dtype=DOUBLE)
    layer = key_of(model[0])
    keep = keep_mask(0, 7, layer, 11, x.shape, 0.3)
    assert torch.equal(run(model, x, first=11, step=7), x * keep * (1 / (1 - 0.3)))
    assert not keep.all()
    assert keep.any()


def test_the_gradient_is_that_of_the_same_mask_and_one_byte_per_element_is_kept() -> None:
    model = keyed(nn.Dropout(0.3))
    x = torch.randn(6, 50, dtype=DOUBLE, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = run(model, x)
    weights = torch.randn_like(output)
    (output * weights).sum().backward()
    assert torch.equal(x.grad, weights * (1 / (1 - 0.3)) * (output != 0))  # type: ignore[arg-type]
    assert sum(t.numel() * t.element_size() for t in saved if t.dtype == torch.bool) == 300
    assert [t.dtype for t in saved] == [torch.bool]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_stay_and_masks_are_the_same(dtype: torch.dtype) -> None:
    model = keyed(nn.Dropout(0.5))
    exact = run(model, torch.ones(8, 64, dtype=DOUBLE))
    output = run(model, torch.ones(8, 64, dtype=dtype))
    assert output.dtype == dtype
    assert torch.equal(output.double(), exact)


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_p_of_nothing_and_of_everything(kind: type[nn.Module]) -> None:
    x = torch.randn(4, 3, 5, requires_grad=True)
    assert torch.equal(run(keyed(kind(0.0)), x), x)
    nothing = run(keyed(kind(1.0)), x)
    assert torch.equal(nothing, torch.zeros_like(x))
    nothing.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))  # type: ignore[arg-type]


def test_inplace_is_in_place() -> None:
    model = keyed(nn.Dropout(0.5, inplace=True), nn.AlphaDropout(0.5, inplace=True))
    x = torch.randn(4, 6)
    expected = run(keyed(nn.Dropout(0.5), nn.AlphaDropout(0.5)), x)
    assert run(model, x) is x
    assert torch.equal(x, expected)


def with_noise(noise: Tensor, kind: nn.Module, x: Tensor) -> Tensor:
    """torch's own formula with a given mask."""
    keep = noise.to(x.dtype)
    p = kind.p
    if isinstance(kind, nn.AlphaDropout | nn.FeatureAlphaDropout):
        scale = 1 / math.sqrt((1.7580993408473766**2 * p + 1) * (1 - p))
        return x * (keep * scale) + ((keep - 1) * 1.7580993408473766 * scale + 1.7580993408473766 * scale * p)
    return x * keep / (1 - p)


CHANNELS = [
    (nn.Dropout1d, (8, 16, 5), (8, 16, 1)),
    (nn.Dropout1d, (16, 5), (1, 16, 1)),
    (nn.Dropout2d, (8, 16, 5, 3), (8, 16, 1, 1)),
    (nn.Dropout2d, (8, 16, 5), (8, 16, 1)),
    (nn.Dropout3d, (8, 16, 5, 3, 2), (8, 16, 1, 1, 1)),
    (nn.Dropout3d, (16, 5, 3, 2), (1, 16, 1, 1, 1)),
    (nn.FeatureAlphaDropout, (8, 16, 5, 3), (8, 16, 1, 1)),
    (nn.AlphaDropout, (8, 16, 5), (8, 16, 5)),
]


@pytest.mark.parametrize(("kind", "shape", "mask_shape"), CHANNELS)
def test_channels_are_dropped_whole(
    kind: Callable[[float], nn.Module],
    shape: tuple[int, ...],
    mask_shape: tuple[int, ...],
) -> None:
    model = keyed(kind(0.4))
    x = torch.randn(shape, dtype=DOUBLE)
    keep = keep_mask(0, 0, key_of(model[0]), 3, mask_shape, 0.4)
    keep = keep[0] if len(mask_shape) > len(shape) else keep
    output = run(model, x, first=3)
    assert output.shape == shape
    torch.testing.assert_close(output, with_noise(keep, model[0], x), rtol=0, atol=1e-14)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what Dropout2d makes of three dims
        plain = kind(0.4)(x)
    assert plain.shape == shape


@pytest.mark.parametrize("kind", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_alpha_dropout_takes_the_two_values_that_torchs_takes(kind: Callable[[float], nn.Module]) -> None:
    x = torch.full((32, 64), 2.0, dtype=DOUBLE)
    values, expected = run(keyed(kind(0.3)), x), kind(0.3)(x)
    torch.testing.assert_close(values.unique(), expected.unique(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("parts", [(12,), (6, 6), (1, 0, 11), (5, 4, 3)])
def test_however_a_batch_is_cut_the_output_is_the_same(parts: tuple[int, ...]) -> None:
    model = keyed(nn.Dropout(0.2), nn.Dropout1d(0.3), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2))
    x = torch.randn(12, 4, 6, dtype=DOUBLE)
    first, outputs = 0, []
    for part in x.split(parts):
        outputs.append(run(model, part, first))
        first += len(part)
    assert torch.equal(torch.cat(outputs), run(model, x))


def test_steps_seeds_and_layers_have_masks_of_their_own() -> None:
    model = keyed(nn.Dropout(0.5), nn.Dropout(0.5))
    x = torch.ones(8, 64)
    outputs = [run(model[:1], x), run(model[1:], x), run(model[:1], x, step=1), run(model[:1], x, seed=1)]
    assert len({output.numpy().tobytes() for output in outputs}) == 4
    assert torch.equal(run(model[:1], x), outputs[0])


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.dropout(x), self.dropout(x)


def test_a_module_used_twice_draws_twice() -> None:
    model = Reused()
    key_dropout(model, Wrapping())
    x = torch.ones(8, 64)
    with scope(seed=0, step=0, first_sample=0):
        one, two = model(x)
    assert not torch.equal(one, two)
    with scope(seed=0, step=0, first_sample=0):
        again, twice = model(x)
    assert torch.equal(one, again)
    assert torch.equal(two, twice)


def test_a_captured_position_makes_the_same_again() -> None:
    model = keyed(nn.Dropout(0.5))
    x = torch.ones(8, 64)
    with scope(seed=0, step=0, first_sample=0):
        model(x)
        captured = current()
        second = model(x)
    with restore(captured):
        assert torch.equal(model(x), second)


def test_in_eval_mode_nothing_is_dropped() -> None:
    model = keyed(nn.Dropout(0.5), nn.AlphaDropout(0.5)).eval()
    x = torch.randn(4, 6)
    assert torch.equal(run(model, x), x)


def test_outside_a_scope_torch_draws() -> None:
    model, plain = keyed(nn.Dropout(0.5)), nn.Dropout(0.5)
    x = torch.randn(4, 60)
    torch.manual_seed(0)
    ours = model(x)
    torch.manual_seed(0)
    assert torch.equal(ours, plain(x))
    assert not torch.equal(ours, model(x))


def test_inside_a_scope_torchs_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    run(keyed(nn.Dropout(0.5)), torch.randn(4, 6, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state)


def test_keying_counts_and_twice_is_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Sequential(nn.Dropout2d(0.1), nn.Identity()))
    wrappings = [Wrapping(), Wrapping()]
    assert key_dropout(model, wrappings[0]) == 2
    keys = [key_of(module) for module in keyed_modules(model)]
    assert key_dropout(model, wrappings[1]) == 2
    assert [key_of(module) for module in keyed_modules(model)] == keys
    wrappings[1].remove()
    assert keyed_modules(model) == []  # one entry each, not two


def test_a_wrapping_that_ends_leaves_the_keys_of_a_later_one() -> None:
    model, first, second = nn.Sequential(nn.Dropout(0.5)), Wrapping(), Wrapping()
    key_dropout(model, first)
    key_dropout(model, second)
    first.remove()
    assert len(keyed_modules(model)) == 1
    second.remove()
    assert keyed_modules(model) == []
    assert key_dropout(model, first) == 1


def test_a_model_that_is_keyed_again_forgets_which_part_of_the_whole_it_saw() -> None:
    model = keyed(nn.Dropout(0.5))
    x = torch.ones(4, 6)
    whole = run(model, x)
    set_global_indices(model[0], lambda size: torch.arange(size) + size)
    split_features(model[0], 1, 2)
    assert not torch.equal(run(model, x), whole)
    other = copy.deepcopy(model)
    key_dropout(other, Wrapping())
    assert torch.equal(run(other, x), whole)


def test_a_forward_that_the_user_has_replaced_is_kept_and_named() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    model[0].forward = lambda x: x + 1  # type: ignore[assignment]
    assert key_dropout(model, Wrapping()) == 0
    assert torch.equal(run(model, torch.zeros(2, 2)), torch.ones(2, 2))
    assert unkeyed_dropout(model) == ["0"]


def test_a_part_of_a_model_keeps_the_keys_of_the_whole() -> None:
    model = keyed(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)))
    x = torch.ones(8, 64)
    before = run(model[1], x)
    stage = nn.Sequential(model[1])
    assert key_dropout(stage, Wrapping()) == 1
    assert torch.equal(run(stage, x), before)
    assert not torch.equal(before, run(model[:1], x))


def test_classes_names_and_state_stay() -> None:
    class Named(nn.Dropout):
        """A subclass that drops as its parent does."""

    model = nn.Sequential(nn.Dropout(0.5), Named(0.5))
    text = repr(model)
    key_dropout(model, Wrapping())
    assert [type(module) for module in model] == [nn.Dropout, Named]
    assert repr(model) == text
    assert model.state_dict() == {}
    assert len(keyed_modules(model)) == 2
    model[0].p = 0.0
    assert torch.equal(run(model[:1], torch.ones(4, 4)), torch.ones(4, 4))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_keyed_and_their_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = keyed(nn.Dropout(0.5))
    other = copied(model)
    x = torch.ones(8, 64)
    assert torch.equal(run(other, x), run(model, x))
    other.eval()
    assert not torch.equal(run(model, x), x)
    assert torch.equal(run(other, x), x)


def test_a_saved_model_is_loaded_keyed() -> None:
    file = io.BytesIO()
    torch.save(keyed(nn.Dropout(0.5)), file)
    file.seek(0)
    assert len(keyed_modules(torch.load(file, weights_only=False))) == 1


def first_key() -> int:
    return key_of(keyed(nn.Dropout())[0])


def test_keys_do_not_depend_on_the_process(warm_ranks: Callable[[int], Ranks]) -> None:
    """A rank is forked from another interpreter, in which Python's own hash of a text is another."""
    assert warm_ranks(1).run(first_key) == [first_key()]


class Odd(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def test_what_cannot_be_keyed_is_named() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.ModuleDict(
        {
            "fine": nn.Dropout(0.5),
            "lstm": nn.LSTM(4, 4, num_layers=2, dropout=0.5),
            "without": nn.GRU(4, 4, num_layers=2),
            "attention": nn.MultiheadAttention(4, 2, dropout=0.1),
            "encoder": encoder,
            "odd": Odd(0.5),
            "harmless": Odd(0.0),
        }
    )
    assert unkeyed_dropout(model) == ["lstm", "attention", "encoder.self_attn", "odd"]
    assert unkeyed_dropout(Odd(0.5)) == ["the model"]
    assert key_dropout(model, Wrapping()) == 4
    assert type(model["odd"]).forward is Odd.forward
    encoder.self_attn.dropout = 0.0
    x = torch.randn(4, 6, 8)
    whole = run(encoder, x)
    torch.testing.assert_close(torch.cat([run(encoder, x[:1]), run(encoder, x[1:], first=1)]), whole)


def test_a_mask_that_would_be_another_in_the_backward_pass_is_refused() -> None:
    """torch.utils.checkpoint keeps torch's generator, and knows nothing of scopes."""
    model = keyed(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    with scope(seed=0, step=0, first_sample=0):
        output = checkpoint(model, torch.randn(2, 4), use_reentrant=False)
    with pytest.raises(UserError, match=r"dropout in 1 runs again in the backward pass.*seed=None"):
        output.sum().backward()
