"""Logits that wait: what is fused, what is computed, and that gradients are right whoever reads them."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.nn.float8 import Float8Linear
from echelon.nn.head.deferred import (
    Deferral,
    DeferredHead,
    DeferredLogits,
    awaited_weight,
    compute,
    defer,
    find_head,
    fused_cross_entropy,
    is_deferred,
)
from echelon.nn.wrapping import Wrapping

VOCABULARY = 1030


def inputs(seed: int = 0) -> tuple[Tensor, nn.Parameter, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, 6, 8, generator=generator).bfloat16().requires_grad_()
    weight = nn.Parameter((torch.randn(VOCABULARY, 8, generator=generator) / 3).bfloat16())
    return hidden, weight, nn.Parameter(torch.randn(VOCABULARY, generator=generator).bfloat16())


def targets(*shape: int) -> Tensor:
    values = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    return values.masked_fill(values % 4 == 0, -100)


Loss = Callable[[Tensor], Tensor]


def gradients(loss: Loss, head: Callable[..., Tensor]) -> tuple[Tensor, list[Tensor], bool]:
    """Of both sides; and whether the logits were never computed."""
    hidden, weight, bias = inputs()
    logits = head(hidden * 1, weight, bias)
    total = loss(logits)
    waited = is_deferred(logits)
    total.backward()
    return total.detach(), [each.grad for each in (hidden, weight, bias) if each.grad is not None], waited


def check(loss: Loss, *, fused: bool) -> None:
    total, found, waited = gradients(loss, defer)
    expected_total, expected, _ = gradients(loss, F.linear)
    assert waited is fused
    torch.testing.assert_close(total, expected_total, rtol=1e-5, atol=1e-5)
    assert len(found) == len(expected) == 3
    for mine, right in zip(found, expected, strict=True):
        assert float((mine.double() - right.double()).norm() / right.double().norm()) < (
            1e-2 if fused else 1e-9
        )


def rows(logits: Tensor) -> Tensor:
    return logits.float().flatten(0, -2)


def known(logits: Tensor) -> Tensor:
    """As the losses that the engine knows call it."""
    total = fused_cross_entropy(logits, targets(2, 6))
    return F.cross_entropy(rows(logits), targets(12), reduction="sum") if total is None else total


class Doubled(torch.autograd.Function):
    """It sees values, and returns a gradient of logits that is one number."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.shape = logits.shape
        return 2 * logits.float().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return (2 * gradient).bfloat16().expand(ctx.shape)


def doubled(logits: Tensor) -> Tensor:
    function: Any = Doubled
    total: Tensor = function.apply(logits)
    return total


def written_past_autograd(logits: Tensor) -> Tensor:
    logits.data.mul_(0.5)
    return known(logits)


COMPUTED: dict[str, Loss] = {
    "a cross entropy of the user's": lambda x: F.cross_entropy(rows(x), targets(12)),
    "label smoothing": lambda x: F.cross_entropy(rows(x), targets(12), label_smoothing=0.1),
    "in bf16": lambda x: F.cross_entropy(x.flatten(0, -2), targets(12)).float(),
    "a cap": lambda x: known(torch.tanh(x / 30) * 30),
    "a sum": lambda x: x.sum().float(),  # its gradient is one number, with strides of 0
    "some columns": lambda x: x[..., :1000].float().logsumexp(-1).sum(),
    "a shifted copy": lambda x: F.cross_entropy(
        x[:, :-1].contiguous().view(-1, VOCABULARY).float(), targets(10)
    ),
    "written in place": lambda x: known(x.mul_(0.5)),
    "written past autograd": written_past_autograd,
    "strides": lambda x: torch.as_strided(x, x.shape, x.stride()).float().square().mean(),
    "a function of the user's": doubled,
}


def test_known_losses_are_fused() -> None:
    check(known, fused=True)
    check(lambda x: known(x) / 3, fused=True)


@pytest.mark.parametrize("name", COMPUTED)
def test_anything_else_gets_the_logits(name: str) -> None:
    check(COMPUTED[name], fused=False)


@pytest.mark.parametrize(
    "also",
    [
        lambda x: 1e-2 * x.float().logsumexp(-1).square().mean(),
        lambda x: known(x) * 2,
        lambda x: doubled(x) / 100,
    ],
)
@pytest.mark.parametrize("is_before", [False, True])
def test_a_fused_loss_and_others_add_up(also: Loss, is_before: bool) -> None:
    def loss(logits: Tensor) -> Tensor:
        other = also(logits) if is_before else torch.zeros(())
        return known(logits) + (other if is_before else also(logits))

    total, found, _ = gradients(loss, defer)
    expected_total, expected, _ = gradients(loss, F.linear)
    torch.testing.assert_close(total, expected_total, rtol=1e-5, atol=1e-3)
    for mine, right in zip(found, expected, strict=True):
        assert float((mine.double() - right.double()).norm() / right.double().norm()) < 2e-2


def test_a_first_reader_without_gradients_takes_none_from_later_ones() -> None:
    def loss(logits: Tensor) -> Tensor:
        with torch.no_grad():
            accuracy = logits.argmax(-1).float().mean()
        return known(logits) + 10 * logits.float().square().mean() + 0 * accuracy

    check(loss, fused=False)


def test_a_graph_that_is_retained_is_walked_again() -> None:
    hidden, weight, bias = inputs()
    logits = defer(hidden * 1, weight, bias)
    loss = known(logits)
    other = logits.float().square().mean()
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (of_other,) = torch.autograd.grad(other, hidden)
    (expected,) = torch.autograd.grad(F.linear(hidden * 1, weight, bias).float().square().mean(), hidden)
    assert torch.equal(first, second)
    torch.testing.assert_close(of_other, expected)


def test_a_second_gradient_is_refused() -> None:
    hidden, weight, _ = inputs()
    (gradient,) = torch.autograd.grad(known(defer(hidden * 1, weight, None)) * 2, hidden, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.float().square().sum().backward()


def test_hidden_states_that_have_changed_are_refused() -> None:
    hidden, weight, _ = inputs()
    states = hidden.detach().clone()
    logits = defer(states, weight, None)
    states.add_(1)
    with pytest.raises(UserError, match="changed in place before the loss"):
        known(logits)


def test_gradients_go_where_they_are_wanted_and_nowhere_else() -> None:
    hidden, weight, _ = inputs()
    weight.requires_grad_(False)
    known(defer(hidden * 1, weight, None)).backward()
    assert hidden.grad is not None
    assert weight.grad is None
    weight.requires_grad_(True)
    with torch.no_grad():
        logits: Any = defer(hidden, weight, None)
        loss = known(logits)
        expected = known(F.linear(hidden, weight))
    assert not loss.requires_grad
    assert logits.product.wanted == (False, False, False)
    assert logits.product.is_fused
    torch.testing.assert_close(loss, expected)


def test_attributes_are_those_of_logits_and_compute_nothing() -> None:
    hidden, weight, bias = inputs()
    logits = defer(hidden * 1, weight, bias)
    assert (logits.shape, logits.dtype, logits.ndim, len(logits)) == (
        (2, 6, VOCABULARY),
        torch.bfloat16,
        3,
        2,
    )
    assert logits.requires_grad
    assert not logits.is_leaf
    assert logits.grad is None
    assert awaited_weight(logits) is weight
    assert is_deferred(logits)
    assert logits.is_contiguous()  # of memory: it is there now
    assert not is_deferred(logits)
    assert logits.tolist() == F.linear(hidden, weight, bias).tolist()
    assert awaited_weight(logits) is None


def test_what_reads_past_torch_s_functions_sees_no_number() -> None:
    hidden, weight, _ = inputs()
    logits = defer(hidden * 1, weight, None)
    with torch._C.DisableTorchFunctionSubclass():
        assert bool(logits.isnan().all())


def test_a_hook_of_the_user_s_sees_the_gradient_of_logits() -> None:
    hidden, weight, _ = inputs()
    seen: list[Tensor] = []
    logits = defer(hidden * 1, weight, None)
    logits.register_hook(lambda gradient: seen.append(gradient.abs().sum()))
    known(logits).backward()
    assert float(seen[0]) > 0
    assert not is_deferred(logits)


@pytest.mark.parametrize("loss", [known, COMPUTED["a cap"]])
def test_nothing_of_it_outlives_the_pass(loss: Loss) -> None:
    hidden, weight, bias = inputs()
    logits: Any = defer(hidden * 1, weight, bias)
    kept = weakref.ref(logits.product)
    gc.disable()
    try:
        loss(logits).backward()
        del logits
        assert kept() is None
    finally:
        gc.enable()


def test_other_tensors_are_what_they_are() -> None:
    x = torch.ones(2)
    assert compute(x) is x
    assert not is_deferred(x)
    assert awaited_weight(x) is None
    assert not isinstance(x, DeferredLogits)


def model(columns: int = 2000) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, columns))


def test_the_last_linear_layer_of_many_columns_is_the_head() -> None:
    module = model()
    assert find_head(module) is module[3]
    assert find_head(model(columns=10)) is None
    assert find_head(nn.Sequential(nn.ReLU())) is None


def test_a_layer_that_is_called_in_another_way_is_none() -> None:
    class Capped(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).tanh()

    assert find_head(nn.Sequential(Capped(4, 2000))) is None
    module = model()
    module[3].forward = lambda x: x  # type: ignore[method-assign]
    assert find_head(module) is None


def test_a_matrix_that_is_multiplied_in_8_bits_is_none() -> None:
    """A loss that takes its weight would multiply in 16."""
    module = model()
    with Wrapping() as wrapping:
        wrapping.wrap(Float8Linear(module[3], None))  # type: ignore[arg-type]
        assert find_head(module) is None
    assert find_head(module) is module[3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_wait_where_that_is_allowed(dtype: torch.dtype) -> None:
    module, deferral = model().to(dtype), Deferral(differentiates=True)
    with Wrapping() as wrapping:
        wrapping.wrap(DeferredHead(module[3], deferral, compiled=False))
        tokens = torch.tensor([[1, 2]])
        expected = module(tokens)
        assert not is_deferred(expected)
        deferral.is_allowed = True
        found = module(tokens)
        assert is_deferred(found)
        assert torch.equal(found + 0, expected)
        with torch.autocast("cpu"):
            assert not is_deferred(module[3](torch.ones(1, 2, 4, dtype=dtype)))
        with torch.no_grad():  # as in a checkpoint, which calls it again
            assert not is_deferred(module(tokens))
        deferral.is_allowed = False
        assert torch.equal(copy.deepcopy(module)(tokens), expected)
        deferral.is_allowed = True
    assert not is_deferred(module(tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_in_more_precise_types_are_plain_torch_s(dtype: torch.dtype) -> None:
    module, deferral = model().to(dtype), Deferral(is_allowed=True, differentiates=True)
    with Wrapping() as wrapping:
        wrapping.wrap(DeferredHead(module[3], deferral, compiled=False))
        assert not is_deferred(module(torch.tensor([[1, 2]])))
