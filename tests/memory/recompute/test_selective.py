"""recompute=selective: the same gradients to the last bit, from fewer bytes."""

import copy
import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import echelon
from echelon.memory import Meter
from echelon.memory.recompute import selective_operations
from echelon.memory.recompute.selective import _Memo, _Recorder, not_watched, selective
from echelon.memory.recompute.selective_calls import Call
from echelon.models import ModelConfig, build, cross_entropy
from tests.cases import sgd
from tests.contract_models import ResNet, class_loss, images
from tests.nn.huggingface.models import double
from tests.nn.huggingface.models import tokens as hf_tokens

GPT = ModelConfig("gpt", layers=2, width=64, heads=4, vocab=64, sequence=32, tied=True)
LLAMA = ModelConfig("llama", 2, 64, 4, vocab=64, sequence=32, kv_heads=2, ffn=192)

Gradients = list[Tensor]


def tokens(samples: int = 4) -> tuple[Tensor, Tensor]:
    inputs = torch.randint(64, (samples, 33), generator=torch.Generator().manual_seed(0))
    return inputs[:, :-1], inputs[:, 1:]


def measure(
    compute: Callable[[], Tensor], module: nn.Module, *, recompute: bool, backwards: int = 1
) -> tuple[int, Gradients]:
    """The bytes that a forward pass leaves for the backward pass, and the gradients."""
    module.zero_grad()
    storages = {"parameters": list(module.parameters()), "gradients": [], "optimizer": [], "buffers": []}
    meter = Meter(module, lambda: storages)
    with meter.activations(), selective() if recompute else nullcontext():
        loss = compute()
    kept = meter.read().now["activations"]
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=left > 0)
    del loss
    assert meter.read().now["activations"] == 0, "something outlives the backward pass"
    return kept, [p.grad.clone() for p in module.parameters() if p.grad is not None]


def compare(compute: Callable[[], Tensor], module: nn.Module, **options: Any) -> float:
    """Asserts equal gradients; the share of the bytes that are kept."""
    kept, expected = measure(compute, module, recompute=False, **options)
    left, found = measure(compute, module, recompute=True, **options)
    assert expected, "nothing is trained"
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    return left / kept


# Models.


@pytest.mark.slow_cases("config0-0.62-dtype1", "config1-0.5-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("config", "most"), [(GPT, 0.62), (LLAMA, 0.5)])
def test_our_models(config: ModelConfig, most: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, (inputs, targets) = build(config).to(dtype), tokens()
    assert compare(lambda: cross_entropy(model(inputs), targets)[0], model) < most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_keeps_at_most_60_percent(dtype: torch.dtype) -> None:
    """16 widths per token without: of these the outputs of both norms, of GELU, and the residual stream
    between attention and feed-forward are computed again."""
    block = build(GPT).blocks[0].to(dtype)
    x = torch.randn(4, 32, 64, dtype=dtype, requires_grad=True)
    share = compare(lambda: block(x).sum(), block)
    assert 0.5 < share <= 0.6


@pytest.mark.slow_cases("gpt2-0.7-eager", "llama-0.7-eager")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("kind", "most"), [("llama", 0.7), ("gpt2", 0.7)])
def test_models_of_transformers(kind: str, most: float, attention: str) -> None:
    model, (inputs, targets) = double(kind, attention), hf_tokens(0)
    assert compare(lambda: cross_entropy(model(inputs), targets)[0], model) < most


@pytest.mark.parametrize("trains_norms", [False, True])
def test_a_resnet(trains_norms: bool) -> None:
    """A norm that also counts statistics counts them once."""
    torch.manual_seed(0)
    model, (inputs, targets) = ResNet(), images(0)
    for module in model.modules():
        module.training = trains_norms
    statistics = []

    def compute() -> Tensor:
        loss = class_loss(model(inputs), targets)
        statistics.append([buffer.clone() for buffer in model.buffers()])
        return loss

    before = copy.deepcopy(list(model.buffers()))
    assert compare(compute, model) < 0.8
    if trains_norms:
        after = list(model.buffers())
        assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))
        assert all(torch.equal(*pair) for pair in zip(statistics[1], after, strict=True))


@pytest.mark.slow_cases("config0-0.0", "config1-0.0", "config1-0.1")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("config", [GPT, LLAMA])
def test_an_engine_trains_to_the_same_weights_from_fewer_bytes(config: ModelConfig, dropout: float) -> None:
    torch.manual_seed(0)
    model = build(dataclasses.replace(config, dropout=dropout))
    weights, kept = {}, {}
    for recompute in ("none", "selective"):
        plan = f"recompute={recompute} microbatches=2"
        with echelon.parallelize(copy.deepcopy(model), plan, optimizer=sgd, loss=cross_entropy) as engine:
            losses = [engine.step(tokens()).loss for _ in range(5)]  # the meter looks at the first three
            kept[recompute] = engine.memory().peak["activations"]
            assert engine.memory().now["activations"] == 0
            weights[recompute] = engine.full_state_dict()
        assert losses[-1] < losses[0]
    assert kept["selective"] < 0.62 * kept["none"]
    for name, weight in weights["none"].items():
        assert torch.equal(weight, weights["selective"][name]), name


# What is computed again, and what is kept.


class Layer(nn.Module):
    """A product, then something, then a product."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def share_of(middle: Callable[[Tensor], Tensor], **options: Any) -> float:
    torch.manual_seed(0)
    layer, x = Layer(middle), torch.randn(32, 16, requires_grad=True)
    return compare(lambda: layer(x).square().sum(), layer, **options)


def test_chains_are_computed_again_from_what_is_kept() -> None:
    assert share_of(lambda h: F.silu(h) * torch.sigmoid(h) + 1) < 0.4


def test_views_of_an_output_are_found() -> None:
    assert share_of(lambda h: F.gelu(h).view(4, 8, 64).transpose(0, 1).reshape(32, 64)) < 0.8
    assert share_of(lambda h: F.gelu(h).chunk(2, dim=1)[1].repeat(1, 2)) < 1.1


def test_results_that_a_function_saves_are_computed_again() -> None:
    assert share_of(lambda h: torch.tanh(h * h)) < 0.7


def test_arguments_that_nobody_keeps_are_not_kept_instead() -> None:
    alive = []

    def middle(h: Tensor) -> Tensor:
        alive[:] = h @ torch.eye(64), h @ torch.ones(64, 64)
        return alive[0] + alive[1]

    assert share_of(torch.tanh) == 1.0
    assert share_of(middle) == 1.0


def test_a_product_runs_again_for_a_sum_if_its_rows_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def share() -> float:
        torch.manual_seed(0)
        layer, norm, x = nn.Linear(16, 16), nn.LayerNorm(16), torch.randn(64, 16, requires_grad=True)
        return compare(lambda: norm(x + layer(norm(x))).square().sum(), layer)

    short = share()
    monkeypatch.setitem(selective_operations._BYTES_PER_FLOP, "cpu", 10.0)  # as if it had 1600
    assert short < share() - 0.1


def test_half_of_the_products_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost the most per byte."""
    ran: list[Any] = []
    layers, norm = nn.ModuleList(nn.Linear(16, 16) for _ in range(6)), nn.LayerNorm(16)

    def stream() -> Tensor:
        x = torch.randn(64, 16, requires_grad=True)
        for layer in layers:
            x = x + layer(norm(x))
        return norm(x).square().sum()

    with selective():
        total = stream()
    run = Call._run
    monkeypatch.setattr(Call, "_run", lambda call: ran.append(call.function) or run(call))
    total.backward()
    assert ran.count(F.linear) == 3


def test_logits_are_kept_in_place_of_their_float32_copy() -> None:
    """The loss casts a view of them, which is gone when log-softmax has computed what it saves."""
    torch.manual_seed(0)
    head = nn.Linear(16, 256).bfloat16()
    x, targets = torch.randn(4, 32, 16, dtype=torch.bfloat16), torch.randint(256, (4, 32))
    assert compare(lambda: cross_entropy(head(x), targets)[0], head) < 0.55


def test_long_chains_are_kept() -> None:
    def middle(h: Tensor) -> Tensor:
        for _ in range(40):
            h = h + h.sin()
        return h

    assert 0.03 < share_of(middle) < 0.5


@pytest.mark.parametrize(
    "middle",
    [
        lambda h: F.gelu(h).mul_(2),
        lambda h: F.gelu(h).clamp_(min=0.1),
        lambda h: _changed_behind(F.gelu(h)),
        lambda h: _changed_without_gradient(F.gelu(h)),
        lambda h: _changed_behind_without_gradient(F.gelu(h)),
        lambda h: torch.add(h, 1, out=None).exp_(),
        lambda h: _changed_by_compiled_code(F.gelu(h)),
    ],
    ids=["mul_", "clamp_", "data", "no_grad", "data_no_grad", "exp_", "compiled"],
)
def test_what_is_changed_in_place_is_kept_as_it_is(middle: Callable[[Tensor], Tensor]) -> None:
    share_of(middle)


def _changed_behind(h: Tensor) -> Tensor:
    h.data.add_(1)  # no version tells of it
    return h


def _changed_by_compiled_code(h: Tensor) -> Tensor:
    with not_watched():
        return h.mul_(2)


@torch.no_grad()
def _changed_without_gradient(h: Tensor) -> Tensor:
    return h.mul_(2)


@torch.no_grad()
def _changed_behind_without_gradient(h: Tensor) -> Tensor:
    return _changed_behind(h)


def test_gradients_of_gradients() -> None:
    layer, x = Layer(F.gelu), torch.randn(32, 16, requires_grad=True)

    def compute() -> Tensor:
        (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        return gradient.square().sum()

    compare(compute, layer)


def test_random_functions_are_not_drawn_again() -> None:
    def middle(h: Tensor) -> Tensor:
        torch.manual_seed(1)
        return F.dropout(F.gelu(h), 0.5) + torch.rand_like(h) * h

    assert share_of(middle) < 1


def test_a_checkpoint_inside_is_left_alone() -> None:
    share_of(lambda h: checkpoint(lambda each: F.gelu(each).sin(), h, use_reentrant=False))


def test_without_gradients_nothing_is_watched() -> None:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks
    with torch.no_grad(), selective():
        assert hooks(False) is None
    with selective():
        assert hooks(False) is not None
    assert hooks(False) is None


def test_a_block_takes_little_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls nothing that must be watched operation by operation; and what query, key and value save is
    looked at once, not three times."""
    settled: list[Any] = []
    settle = _Memo._settle

    def noted(self: _Memo, call: Any, num_bytes: int) -> bool:
        settled.append(call.function)
        return settle(self, call, num_bytes)

    monkeypatch.setattr(_Memo, "_settle", noted)
    monkeypatch.setattr(_Recorder, "__enter__", lambda _: pytest.fail("watched by operation"))
    block, x = build(GPT).blocks[0], torch.randn(4, 32, 64, requires_grad=True)
    with selective():
        block(x)
    assert settled == [F.layer_norm, Tensor.add, F.layer_norm, F.gelu]


def test_products_that_are_too_long_are_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(selective_operations._BYTES_PER_FLOP, "cpu", 10.0)
    monkeypatch.setattr(_Memo, "record", lambda *_: pytest.fail("noted"))
    with selective():
        nn.Linear(16, 64)(torch.randn(32, 16))


def test_autocast_inside_a_model() -> None:
    def middle(h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (F.softmax(F.gelu(h) @ h.T.float(), -1).float() @ h).float()

    share_of(middle)


def test_complex_numbers_and_casts_of_memory() -> None:
    share_of(lambda h: (torch.view_as_complex(h.view(32, 32, 2)) * 1j).abs().repeat(1, 2))
    share_of(lambda h: (h * 2).view(torch.int32).view(torch.float32) * h)
