"""Logits that wait: what is fused, what is computed, and that gradients are right whoever reads them."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.nn.head.deferred import DeferredLogits, awaited_weight, compute, defer, is_deferred

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


FUSED: dict[str, Loss] = {
    "sum": lambda x: F.cross_entropy(rows(x), targets(12), reduction="sum"),
    "mean": lambda x: F.cross_entropy(rows(x), targets(12)),
    "another number ignored": lambda x: F.cross_entropy(rows(x), targets(12).clamp(0), ignore_index=0),
    "shifted": lambda x: F.cross_entropy(
        x[..., :-1, :].float().contiguous().view(-1, VOCABULARY), targets(10)
    ),
    "rows by a slice": lambda x: F.cross_entropy(
        x[:, 2:].reshape(-1, VOCABULARY).to(torch.float32), targets(8)
    ),
    "of transformers": lambda x: nn.CrossEntropyLoss()(x.float().view(-1, VOCABULARY), targets(12)) * 3,
    "two losses": lambda x: (
        F.cross_entropy(rows(x), targets(12))
        + 2 * F.cross_entropy(rows(x[:, :3]), targets(6), reduction="sum")
    ),
    "torch.flatten": lambda x: F.cross_entropy(torch.flatten(x.to(torch.float32), 0, 1), targets(12)),
}
COMPUTED: dict[str, Loss] = {
    "label smoothing": lambda x: F.cross_entropy(rows(x), targets(12), label_smoothing=0.1),
    "no reduction": lambda x: F.cross_entropy(rows(x), targets(12), reduction="none").square().sum(),
    "weights of classes": lambda x: F.cross_entropy(rows(x), targets(12), weight=torch.ones(VOCABULARY)),
    "probabilities": lambda x: F.cross_entropy(rows(x), torch.full((12, VOCABULARY), 1 / VOCABULARY)),
    "in bf16": lambda x: F.cross_entropy(x.flatten(0, -2), targets(12)).float(),
    "a cap": lambda x: F.cross_entropy(torch.tanh(rows(x) / 30) * 30, targets(12)),
    "a sum": lambda x: x.sum().float(),  # its gradient is one number, with strides of 0
    "classes that are some columns": lambda x: F.cross_entropy(
        x[..., :1000].float().flatten(0, -2), targets(12).clamp(max=999)
    ),
    "some columns": lambda x: x[..., :1000].float().logsumexp(-1).sum(),
    "one position": lambda x: x[:, -1].float().square().mean(),
    "other columns": lambda x: x.float().view(2, 3, 2 * VOCABULARY).logsumexp(-1).sum(),
    "written in place": lambda x: F.cross_entropy(rows(x.mul_(0.5)), targets(12)),
}


@pytest.mark.parametrize("name", FUSED)
def test_cross_entropies_of_rows_are_fused(name: str) -> None:
    check(FUSED[name], fused=True)


@pytest.mark.parametrize("name", COMPUTED)
def test_anything_else_gets_the_logits(name: str) -> None:
    check(COMPUTED[name], fused=False)


def test_a_fused_loss_and_one_of_the_logits_add_up() -> None:
    def loss(logits: Tensor) -> Tensor:
        return (
            F.cross_entropy(rows(logits), targets(12)) + 1e-2 * logits.float().logsumexp(-1).square().mean()
        )

    total, found, waited = gradients(loss, defer)
    expected_total, expected, _ = gradients(loss, F.linear)
    assert not waited
    torch.testing.assert_close(total, expected_total)
    for mine, right in zip(found, expected, strict=True):
        assert float((mine.double() - right.double()).norm() / right.double().norm()) < 2e-2


def test_losses_of_a_retained_graph_are_walked_one_by_one() -> None:
    hidden, weight, bias = inputs()
    logits = defer(hidden * 1, weight, bias)
    first, second = (F.cross_entropy(rows(logits), targets(12).roll(n), reduction="sum") for n in (0, 1))
    (of_first,) = torch.autograd.grad(first, hidden, retain_graph=True)
    (of_second,) = torch.autograd.grad(second, hidden, retain_graph=True)
    (of_both,) = torch.autograd.grad(first + second, hidden)
    torch.testing.assert_close(of_first.float() + of_second.float(), of_both.float(), rtol=2e-2, atol=2e-2)
    assert not torch.equal(of_first, of_second)


def test_a_copy_keeps_its_values_when_logits_are_written_to() -> None:
    hidden, weight, _ = inputs()
    logits = defer(hidden * 1, weight, None)
    before = logits.float()
    logits.zero_()
    assert bool((compute(before) != 0).any())
    assert bool((compute(logits) == 0).all())
    assert bool((logits.float() == 0).all())


def test_hidden_states_that_have_changed_are_refused() -> None:
    hidden, weight, _ = inputs()
    states = hidden.detach().clone()
    logits = defer(states, weight, None)
    states.add_(1)
    with pytest.raises(UserError, match="changed in place before the loss"):
        F.cross_entropy(rows(logits), targets(12))


def test_gradients_go_where_they_are_wanted_and_nowhere_else() -> None:
    hidden, weight, _ = inputs()
    weight.requires_grad_(False)
    F.cross_entropy(rows(defer(hidden * 1, weight, None)), targets(12)).backward()
    assert hidden.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        logits = defer(hidden, weight, None)
        loss = F.cross_entropy(rows(logits), targets(12))
    assert not loss.requires_grad
    torch.testing.assert_close(
        loss, F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), targets(12)).detach()
    )


def test_attributes_are_those_of_logits_and_compute_nothing() -> None:
    hidden, weight, bias = inputs()
    logits = defer(hidden * 1, weight, bias)
    derived = rows(logits)
    assert (logits.shape, logits.dtype, logits.ndim, len(logits)) == (
        (2, 6, VOCABULARY),
        torch.bfloat16,
        3,
        2,
    )
    assert (derived.shape, derived.dtype) == ((12, VOCABULARY), torch.float32)
    assert logits.requires_grad
    assert derived.requires_grad
    assert not derived.is_leaf
    assert awaited_weight(derived) is weight
    assert is_deferred(logits)
    assert logits.tolist() == F.linear(hidden, weight, bias).tolist()
    assert awaited_weight(derived) is None


def test_what_reads_past_torch_s_functions_sees_no_number() -> None:
    hidden, weight, _ = inputs()
    logits = defer(hidden * 1, weight, None)
    with torch._C.DisableTorchFunctionSubclass():
        assert bool(logits.isnan().all())


def test_a_hook_of_the_user_s_sees_the_gradient_of_logits() -> None:
    hidden, weight, _ = inputs()
    logits, seen = defer(hidden * 1, weight, None), []
    logits.register_hook(lambda gradient: seen.append(gradient.abs().sum()))
    F.cross_entropy(rows(logits), targets(12)).backward()
    assert float(seen[0]) > 0
    assert not is_deferred(logits)


@pytest.mark.parametrize("name", ["sum", "a cap"])
def test_nothing_of_it_outlives_the_pass(name: str) -> None:
    hidden, weight, bias = inputs()
    logits: Any = defer(hidden * 1, weight, bias)
    kept = weakref.ref(logits.product)
    gc.disable()
    try:
        (FUSED | COMPUTED)[name](logits).backward()
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
