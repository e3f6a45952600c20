"""Losses as total and count; the cross-entropy in chunks of tokens, against torch's of all tokens at once."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.engine import parallelize
from echelon.errors import UserError
from echelon.launching import RankFailed, launch
from echelon.nn import losses
from echelon.nn import losses as module
from echelon.nn.losses import (
    Sum,
    VocabularyPart,
    Wanted,
    check_loss,
    linear_cross_entropy,
    summed_cross_entropy,
    total_and_count,
)
from echelon.verify import Case, assert_equal
from tests.contract_models import gpt, llama, tokens
from tests.engine.test_arguments import errors_of
from tests.peak_memory import PeakMemory

TOKENS, VOCAB = 13, 7


def logits_and_targets(scale: float, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(TOKENS, VOCAB, dtype=torch.float64, generator=generator)
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    targets[2] = targets[12] = -100
    return logits.to(dtype).requires_grad_(), targets


def chunks_of(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_CPU_CHUNK", tokens * VOCAB)


@pytest.mark.parametrize("tokens", [1, 5, 13])
@pytest.mark.parametrize("scale", [3.0, 1e4])
def test_value_and_gradient_are_those_of_torch(
    scale: float, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks_of(tokens, monkeypatch)
    logits, targets = logits_and_targets(scale)
    expected = F.cross_entropy(logits, targets, reduction="sum")
    total = summed_cross_entropy(logits, targets)
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
    (gradient,) = torch.autograd.grad(0.7 * total, logits)
    (expected_gradient,) = torch.autograd.grad(0.7 * expected, logits)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_a_low_type_are_rounded_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks_of(5, monkeypatch)
    logits, targets = logits_and_targets(3.0, dtype)
    total = summed_cross_entropy(logits, targets)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="sum")
    (gradient,) = torch.autograd.grad(total, logits)
    (expected_gradient,) = torch.autograd.grad(expected, exact)
    assert (total.dtype, gradient.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_chunks_are_powers_of_two_of_tokens_within_the_limit() -> None:
    sizes = [chunk.stop - chunk.start for chunk in losses.token_chunks(100_000, 50_304, on_cpu=False)]
    assert set(sizes[:-1]) == {8192}
    assert sum(sizes) == 100_000
    assert {c.stop - c.start for c in losses.token_chunks(9_216, 10**9, on_cpu=False)} == {1024}


def test_logits_of_minus_infinity_have_neither_loss_nor_gradient() -> None:
    logits, targets = logits_and_targets(3.0)
    masked = torch.cat([logits.detach(), torch.full((TOKENS, 2), -torch.inf)], 1).requires_grad_()
    total, expected = summed_cross_entropy(masked, targets), summed_cross_entropy(logits, targets)
    (gradient,) = torch.autograd.grad(total, masked)
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient[:, :VOCAB], expected_gradient, rtol=1e-12, atol=1e-15)
    assert not gradient[:, VOCAB:].any()


def test_memory_is_the_gradient_and_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 copy of the logits was kept for the backward pass, and another was its gradient."""
    tokens, vocab = 1024, 512
    monkeypatch.setattr(losses, "_CPU_CHUNK", 16 * vocab)
    logits = torch.randn(tokens, vocab).bfloat16().requires_grad_()
    with PeakMemory() as memory:
        summed_cross_entropy(logits, torch.arange(tokens) % vocab).backward()
    chunk, numbers_of_tokens = 16 * vocab * 4, tokens * 64
    assert logits.nbytes <= memory.peak <= logits.nbytes + chunk + numbers_of_tokens


def test_the_backward_pass_keeps_the_logits_themselves() -> None:
    logits, targets = logits_and_targets(3.0)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda x: x):
        summed_cross_entropy(logits, targets)
    assert [tensor.data_ptr() for tensor in saved if tensor.ndim == 2] == [logits.data_ptr()]


def test_no_tokens_have_no_loss() -> None:
    logits = torch.zeros(0, VOCAB, requires_grad=True)
    total = summed_cross_entropy(logits, torch.zeros(0, dtype=torch.int64))
    total.backward()
    assert total == 0
    assert logits.grad is not None
    assert logits.grad.shape == (0, VOCAB)


@pytest.mark.parametrize("target", [-1, VOCAB])
def test_a_target_outside_the_vocabulary_is_an_error(target: int) -> None:
    logits, targets = logits_and_targets(3.0)
    targets[4] = target
    with pytest.raises(IndexError, match="a target is not in the vocabulary of 7"):
        summed_cross_entropy(logits, targets)


def test_a_mean_counts_samples_and_a_pair_counts_itself() -> None:
    total, count = total_and_count(torch.tensor(2.0), 3)
    assert (float(total), count) == (6.0, 3)
    assert total_and_count((torch.tensor(8.0), 4), 3) == (torch.tensor(8.0), 4)


def trained(shape: tuple[int, ...] = ()) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True) * 2


def test_good_losses_pass() -> None:
    check_loss(trained())
    check_loss((trained(), 4))
    check_loss((trained(), torch.tensor(4)))
    with torch.no_grad():
        check_loss(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (1.5, "is a float: must be a tensor"),
        (None, "is None: must be a tensor"),
        (trained((4,)), "is a tensor of shape (4,)"),
        (torch.tensor(1.0), "does not depend on the parameters"),
        ((trained(), 1, 2), "is a tuple of 3"),
        ((trained(), None), "the count is None"),
        ((trained(), trained((4,))), "the count is a tensor of shape (4,)"),
    ],
)
def test_bad_losses(result: Any, says: str) -> None:
    assert says in errors_of(check_loss, result)[0]


def test_both_parts_of_a_pair_are_judged() -> None:
    assert len(errors_of(check_loss, (torch.tensor(1.0), "4"))) == 2


# Losses that are sums: the gradient is that of the sum over the global batch, whatever the plan.


def sum_of_tokens(logits: Tensor, targets: Tensor) -> Sum:
    return Sum(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))


def small_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Its steps have the scale of the gradient, which Adam's have not."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


SUMS = Case(gpt, tokens, sum_of_tokens, small_sgd, steps=5, clip=None)
PLANS = [
    "data=2 microbatches=3",
    "data=4 zero=3 microbatches=2",
    "pipeline=2 microbatches=3",
    "tensor=2 sequence=true",
    "data=2 zero=2 update=backward",
    "data=2 update=last-backward microbatches=3",
    "context=2",
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.slow_cases(*PLANS[3:])
@pytest.mark.usefixtures("warm_contract")
def test_a_sum_is_that_of_one_device(plan: str) -> None:
    assert_equal(SUMS, plan)


def test_a_sum_is_multiplied_by_the_samples_that_it_is_divided_by() -> None:
    total = torch.tensor(6.0, dtype=torch.float16)
    assert total_and_count(Sum(total), 4) == (24.0, 4)
    assert total_and_count(Sum(total), 4, 12) == (72.0, 4)
    assert total_and_count(Sum(total), 4)[0].dtype == torch.float32


def step_of_a_sum(plan: str) -> None:
    with parallelize(llama(), plan, optimizer=small_sgd, loss=sum_of_tokens) as engine:
        engine.step(engine.local(tokens(0)))


@pytest.mark.parametrize(
    "plan", ["data=2 sync=async", pytest.param("pipeline=2 schedule=pipedream", marks=pytest.mark.slow)]
)
def test_a_sum_is_refused_where_updates_are_of_parts_of_the_batch(plan: str) -> None:
    with pytest.raises(
        (UserError, RankFailed), match=r"the loss returned echelon\.Sum with plan .* return a mean"
    ):
        launch(step_of_a_sum, 2, plan)


ALL = Wanted(hidden=True, weight=True, bias=True)


def numbers(
    tokens: int = 37, vocabulary: int = 1030, width: int = 16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, width, generator=generator) for n in (tokens, vocabulary))
    bias = torch.randn(vocabulary, generator=generator)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    targets[::5] = -100
    return hidden.bfloat16(), (weight / 4).bfloat16(), bias.bfloat16(), targets


def in_float64(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> list[Tensor]:
    inputs = [each.double().requires_grad_() for each in (hidden, weight, bias) if each is not None]
    total = F.cross_entropy(F.linear(*inputs), targets, reduction="sum")
    return [total.detach(), *torch.autograd.grad(total, inputs)]


def gap(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("tokens_per_chunk", [1, 8, 37, 64])
def test_loss_and_gradients_are_those_of_whole_logits(
    tokens_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_CPU_ELEMENTS", 1)
    monkeypatch.setattr(losses, "_CPU_LEAST_TOKENS", tokens_per_chunk)
    hidden, weight, bias, targets = numbers()
    total, found = linear_cross_entropy(hidden, weight, bias, targets, -100, ALL)
    expected = in_float64(hidden, weight, bias, targets)
    assert gap(total, expected[0]) < 1e-4  # logits are rounded to bf16, and no more
    assert [gap(each, right) < 4e-3 for each, right in zip(found, expected[1:], strict=True)] == [True] * 3
    assert [each.dtype for each in found if each is not None] == [
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]


def test_chunks_change_nothing_but_the_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias, targets = numbers()
    whole = linear_cross_entropy(hidden, weight, bias, targets, -100, ALL)
    monkeypatch.setattr(losses, "_CPU_ELEMENTS", 1)
    monkeypatch.setattr(losses, "_CPU_LEAST_TOKENS", 5)
    parts = linear_cross_entropy(hidden, weight, bias, targets, -100, ALL)
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-6, atol=0)
    for part, each in zip(parts[1], whole[1], strict=True):
        torch.testing.assert_close(part, each, rtol=1e-2, atol=1e-5)


def test_tokens_that_are_ignored_have_no_gradient_though_they_are_not_finite() -> None:
    hidden, weight, bias, targets = numbers()
    hidden[targets == -100] = torch.inf
    total, found = linear_cross_entropy(hidden, weight, bias, targets, -100, Wanted(True, False, False))
    assert bool(total.isfinite())
    assert found.hidden is not None
    assert bool((found.hidden[targets == -100] == 0).all())
    assert found.weight is None
    assert found.bias is None


def test_another_number_is_ignored_if_asked() -> None:
    hidden, weight, _, targets = numbers()
    other = targets.masked_fill(targets == -100, 7)
    total, _ = linear_cross_entropy(hidden, weight, None, other, 7, Wanted(False, False, False))
    kept = other != 7
    expected = in_float64(hidden[kept], weight, None, other[kept])[0]
    assert gap(total, expected) < 1e-4


def test_a_target_outside_of_the_vocabulary_is_refused() -> None:
    hidden, weight, _, targets = numbers()
    targets[3] = len(weight)
    with pytest.raises(IndexError, match="not in the vocabulary of 1030"):
        linear_cross_entropy(hidden, weight, None, targets, -100, ALL)


def test_what_is_not_wanted_is_not_made() -> None:
    hidden, weight, _, targets = numbers()
    total, found = linear_cross_entropy(hidden, weight, None, targets, -100, Wanted(False, False, False))
    assert found == (None, None, None)
    assert gap(total, in_float64(hidden, weight, None, targets)[0]) < 1e-4


def test_products_have_aligned_columns_whatever_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias, targets = numbers()
    products = []
    lose = module._lose

    def spy(logits: Tensor, words: int, *args: Any, **kwargs: Any) -> None:
        products.append(
            (logits.shape[1], logits.stride(), words, bool((logits[:, words:] == -torch.inf).all()))
        )
        lose(logits, words, *args, **kwargs)
        assert bool((logits[:, words:] == 0).all())

    monkeypatch.setattr(module, "_lose", spy)
    _, found = linear_cross_entropy(hidden, weight, bias, targets, -100, ALL)
    assert products == [(1088, (1088, 1), 1030, True)]
    assert [each.shape for each in found if each is not None] == [hidden.shape, weight.shape, bias.shape]


def test_a_target_of_the_next_part_is_no_column_that_was_appended() -> None:
    hidden, weight, _, _ = numbers()
    targets = torch.full((len(hidden),), len(weight) + 3)
    seen = []

    def gather(parts: Tensor) -> Tensor:
        seen.append(parts)
        return parts[None]

    part = VocabularyPart(0, 2 * len(weight), gather)
    _, found = linear_cross_entropy(hidden, weight, None, targets, -100, ALL, part)
    assert bool((seen[0][1] == 0).all()), "another rank has that logit"
    assert found.weight is not None
    assert float(found.weight.sum(0).abs().max()) > 0
    softmax = F.softmax(hidden.double() @ weight.double().T, dim=1)
    assert gap(found.weight, softmax.T @ hidden.double()) < 4e-3


def test_no_token_has_no_loss() -> None:
    hidden, weight, bias, targets = numbers()
    total, found = linear_cross_entropy(hidden[:0], weight, bias, targets[:0], -100, ALL)
    assert float(total) == 0
    assert [bool((each == 0).all()) for each in found if each is not None] == [True] * 3
