"""The fused loss and its gradients, against float64; chunks of every kind."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.nn import losses
from echelon.nn.head import linear_cross_entropy as module
from echelon.nn.head.linear_cross_entropy import Wanted, linear_cross_entropy
from echelon.nn.losses import VocabularyPart

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
