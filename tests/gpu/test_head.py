"""The kernels of the loss for parts of a vocabulary and for smoothed labels, and a loss that is compiled with
the head: values and gradients are those of float64, and logits in float32 take no memory."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.engine import parallelize
from echelon.nn.losses import VocabularyPart, Wanted, linear_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS, WIDTH, VOCABULARY, SHARE = 3000, 64, 9001, 4501  # the second part has one column of padding
ALL = Wanted(hidden=True, weight=True, bias=True)


def numbers(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, device="cuda").to(dtype) for n in (TOKENS, VOCABULARY))
    bias = torch.randn(VOCABULARY, device="cuda").to(dtype)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")
    targets[::7] = -100
    return hidden, weight / 4, bias, targets


def in_float64(inputs: tuple[Tensor, ...], targets: Tensor, smoothing: float = 0.0) -> list[Tensor]:
    precise = [each.double().requires_grad_() for each in inputs]
    total = F.cross_entropy(F.linear(*precise), targets, reduction="sum", label_smoothing=smoothing)
    return [total.detach(), *torch.autograd.grad(total, precise)]


def gap(found: Tensor | None, expected: Tensor) -> float:
    assert found is not None
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_of_a_vocabulary_make_the_loss_and_gradients_of_all_of_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.nn.losses._ELEMENTS", 1)  # chunks of 1,024 tokens
    hidden, weight, bias, targets = numbers(dtype)
    padded = F.pad(weight, (0, 0, 0, 2 * SHARE - VOCABULARY)), F.pad(bias, (0, 2 * SHARE - VOCABULARY))
    told: dict[int, list[Tensor]] = {0: [], SHARE: []}

    def of_rank(begin: int, heard: list[Tensor]) -> tuple[Tensor, Any]:
        """`heard`: what the other rank has told, one message for each chunk; nothing yet: −inf and 0."""
        messages = iter(heard)

        def gather(parts: Tensor) -> Tensor:
            told[begin].append(parts.clone())
            nothing = torch.stack([torch.full_like(parts[0], -torch.inf), torch.zeros_like(parts[1])])
            return torch.stack([parts, next(messages, nothing)])

        rows, part = (each[begin : begin + SHARE].clone() for each in padded)
        return linear_cross_entropy(
            hidden, rows, part, targets, -100, ALL, VocabularyPart(begin, VOCABULARY, gather)
        )

    of_rank(0, [])
    of_rank(SHARE, [])
    first, second = list(told[0]), list(told[SHARE])
    assert len(first) == 3
    (total, low), (same, high) = of_rank(0, second), of_rank(SHARE, first)
    expected = in_float64((hidden, weight, bias), targets)
    assert gap(total, expected[0]) < 1e-4
    assert gap(same, expected[0]) < 1e-4
    assert gap(low.hidden.double() + high.hidden.double(), expected[1]) < 5e-3
    assert gap(torch.cat([low.weight, high.weight])[:VOCABULARY], expected[2]) < 5e-3
    assert gap(torch.cat([low.bias, high.bias])[:VOCABULARY], expected[3]) < 5e-3
    assert not high.weight[-1].any()


@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_smoothed_labels(smoothing: float) -> None:
    hidden, weight, bias, targets = numbers(torch.bfloat16)
    total, found = linear_cross_entropy(hidden, weight, bias, targets, -100, ALL, None, smoothing)
    expected = in_float64((hidden, weight, bias), targets, smoothing)
    assert gap(total, expected[0]) < 1e-4
    assert [gap(each, right) < 8e-3 for each, right in zip(found, expected[1:], strict=True)] == [True] * 3


def smoothed(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """That the engine does not know."""
    total = F.cross_entropy(output, targets, label_smoothing=0.1, reduction="sum")
    return total + 1e-3 * output.logsumexp(-1).square().sum(), (targets != -100).sum()


def train(plan: str) -> tuple[list[float], int]:
    """Losses, and the memory at the peak of later steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 32_000))
    inputs, targets = torch.randn(8192, WIDTH), torch.randint(0, 32_000, (8192,))
    with parallelize(
        model,
        f"precision=bf16 {plan}",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=smoothed,
        audit="off",
    ) as engine:
        losses = [engine.step((inputs, targets)).loss for _ in range(2)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses += [engine.step((inputs, targets)).loss for _ in range(2)]
        return losses, torch.cuda.max_memory_allocated() - before


def test_a_loss_that_is_compiled_with_the_head_has_no_logits_in_float32() -> None:
    """Logits in bf16 are 0.5 GB here, and each copy in float32 is 1.05 GB."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        losses, peak = train("compile=true")
    assert not [each for each in said if "runs uncompiled" in str(each.message)]
    expected, plain_peak = train("")
    assert losses == pytest.approx(expected, rel=2e-3)
    assert peak < 0.6 * plain_peak
