"""The cross-entropy of logits that are split by vocabulary, against the whole."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.collectives.mesh import Mesh
from echelon.launching import Ranks
from echelon.models import cross_entropy
from echelon.nn import losses
from echelon.nn.huggingface.own_loss import causal_cross_entropy
from echelon.parallel.tensor.modules import SPLIT_LOSSES, split_loss, vocabulary_cross_entropy
from echelon.plan import Plan

Warm = Callable[[int], Ranks]


def logits_and_targets(scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(2, 5, 12, dtype=torch.float64, generator=generator)
    targets = torch.randint(12, (2, 5), generator=generator)
    targets[0, 1] = targets[1, 4] = -100
    return logits, targets


def value_and_gradient(ranks: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, int, dict]:
    group = Mesh.join(Plan(tensor=ranks)).group("tensor")
    logits, targets = logits_and_targets(scale)
    part = logits.to(dtype).chunk(ranks, -1)[group.rank].clone().requires_grad_()
    with mock.patch.object(losses, "_CPU_CHUNK", 4 * part.shape[-1]):
        total, count = vocabulary_cross_entropy(part, targets, group, 12)
        (total * 0.5).backward()
    totals = group.ledger.totals.items()
    sent = {
        operation: (total.count, total.payload)
        for (_, operation, subject), total in totals
        if subject == "loss"
    }
    return total.detach(), part.grad, int(count), sent


@pytest.mark.parametrize("scale", [3.0, 1e4])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_value_and_gradient_are_those_of_all_logits(warm_ranks: Warm, ranks: int, scale: float) -> None:
    logits, targets = logits_and_targets(scale)
    logits.requires_grad_()
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    (total * 0.5).backward()
    whole = float(total.detach())
    by_rank = warm_ranks(ranks).run(value_and_gradient, ranks, scale, torch.float64)
    assert all(count == 8 for _, _, count, _ in by_rank)
    assert all(abs(float(value) - whole) <= 1e-12 * whole for value, *_ in by_rank)
    gradient = torch.cat([part for _, part, *_ in by_rank], -1)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-12, atol=1e-12)


def test_ranks_exchange_two_numbers_per_token_in_one_message(warm_ranks: Warm) -> None:
    """Also those of several chunks of powers."""
    for *_, sent in warm_ranks(2).run(value_and_gradient, 2, 3.0, torch.float64):
        assert sent == {"all_gather": (1, 2 * 2 * 10 * 8)}


def test_it_is_computed_in_float32_at_least(warm_ranks: Warm) -> None:
    for value, gradient, *_ in warm_ranks(2).run(value_and_gradient, 2, 3.0, torch.bfloat16):
        assert value.dtype == torch.float32
        assert gradient.dtype == torch.bfloat16


def test_the_loss_of_the_models_is_known_by_its_name() -> None:
    assert split_loss(cross_entropy) is vocabulary_cross_entropy
    assert split_loss(value_and_gradient) is None
    for loss in (cross_entropy, causal_cross_entropy):
        assert f"{loss.__module__}.{loss.__qualname__}" in SPLIT_LOSSES
    assert len(SPLIT_LOSSES) == 2


def wrong_target(ranks: int) -> str:
    group = Mesh.join(Plan(tensor=ranks)).group("tensor")
    try:
        vocabulary_cross_entropy(torch.zeros(1, 2, 6), torch.tensor([[0, 11]]), group, 11)
    except IndexError as error:
        return str(error)
    return ""


def test_a_target_beyond_the_vocabulary_is_an_error(warm_ranks: Warm) -> None:
    """Also one whose column is padding."""
    assert warm_ranks(2).run(wrong_target, 2) == ["a target is not in the vocabulary of 11"] * 2
