"""The fused loss of a vocabulary that is split over ranks, against float64 on one rank."""

from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.collectives.mesh import Mesh
from echelon.launching import Ranks
from echelon.nn import losses
from echelon.nn.head.deferred import defer, fused_cross_entropy, is_deferred
from echelon.parallel.tensor.entries import vocabulary_part
from echelon.parallel.tensor.modules import vocabulary_cross_entropy
from echelon.plan import Plan
from echelon.state.ownership import share_of

Warm = Callable[[int], Ranks]

TOKENS, WIDTH, CHUNK = 21, 16, 8


def numbers(vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator) for n in (TOKENS, vocabulary))
    bias = torch.randn(vocabulary, generator=generator)
    targets = torch.randint(0, vocabulary, (TOKENS,), generator=generator)
    targets[::5] = -100
    return hidden.to(dtype), (weight / 4).to(dtype), bias.to(dtype), targets


class Found(NamedTuple):
    total: Tensor
    count: int
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    is_fused: bool
    sent: dict[str, tuple[int, int]]


def run(ranks: int, vocabulary: int, dtype: torch.dtype, reader: int | None, scale: float) -> Found:
    """In each rank. `reader`: the rank that looks at its part of the logits first."""
    group = Mesh.join(Plan(tensor=ranks)).group("tensor")
    share = share_of(vocabulary, ranks)
    hidden, weight, bias, targets = numbers(vocabulary, dtype)
    hidden.requires_grad_()
    rows = nn.Parameter(F.pad(weight, (0, 0, 0, share * ranks - vocabulary)).split(share)[group.rank].clone())
    part = nn.Parameter(F.pad(bias, (0, share * ranks - vocabulary)).split(share)[group.rank].clone())
    logits = defer(hidden, rows, part, vocabulary_part(share, group, vocabulary))
    with mock.patch.object(losses, "_CPU_ELEMENTS", 1), mock.patch.object(losses, "_CPU_LEAST_TOKENS", CHUNK):
        if group.rank == reader:
            assert int(logits.isneginf().sum()) == TOKENS * max(0, share * (group.rank + 1) - vocabulary)
        is_fused = is_deferred(logits)
        total, count = vocabulary_cross_entropy(logits, targets, group, vocabulary)
        (total * scale).backward()
    sent = {
        operation: (moved.count, moved.payload)
        for (_, operation, subject), moved in group.ledger.totals.items()
        if subject == "loss"
    }
    gradients = [each.grad for each in (hidden, rows, part)]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    return Found(total.detach(), int(count), *gradients, is_fused, sent)  # type: ignore[arg-type]


def check(found: list[Found], vocabulary: int, dtype: torch.dtype, scale: float) -> None:
    inputs = [each.double().requires_grad_() for each in numbers(vocabulary, dtype)[:3]]
    targets = numbers(vocabulary, dtype)[3]
    total = F.cross_entropy(F.linear(*inputs), targets, reduction="sum")
    expected = torch.autograd.grad(total * scale, inputs)
    assert {float(each.total) for each in found} == {float(found[0].total)}  # the same bits on all ranks
    torch.testing.assert_close(found[0].total.double(), total.detach(), rtol=2e-4, atol=0)
    assert found[0].count == int((targets != -100).sum())
    gathered = [
        torch.stack([each.hidden.double() for each in found]).sum(0),  # by the entry of the head
        torch.cat([each.weight.double() for each in found]),
        torch.cat([each.bias.double() for each in found]),
    ]
    assert not gathered[1][vocabulary:].any()
    for gradient, right in zip(gathered, expected, strict=True):
        gap = (gradient[: len(right)] - right).norm() / right.norm()
        assert float(gap) < (4e-3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("ranks", "vocabulary"), [(2, 1030), (3, 1030), (4, 5)])
def test_loss_and_gradients_are_those_of_all_logits(
    warm_ranks: Warm, ranks: int, vocabulary: int, dtype: torch.dtype
) -> None:
    """Also where a rank has nothing but padding."""
    found = warm_ranks(ranks).run(run, ranks, vocabulary, dtype, None, 0.5)
    assert all(each.is_fused for each in found)
    check(found, vocabulary, dtype, 0.5)


def test_ranks_exchange_two_numbers_per_token_in_a_message_for_each_chunk(warm_ranks: Warm) -> None:
    """The payload of a gather is what it returns: of 2 ranks, 2 numbers of 4 bytes."""
    for each in warm_ranks(2).run(run, 2, 1030, torch.bfloat16, None, 1.0):
        assert each.sent == {"all_gather": (3, 2 * 2 * TOKENS * 4)}


@pytest.mark.parametrize("vocabulary", [1030, 1031])
def test_a_rank_whose_logits_were_read_computes_the_same_beside_one_that_fuses(
    warm_ranks: Warm, vocabulary: int
) -> None:
    found = warm_ranks(2).run(run, 2, vocabulary, torch.bfloat16, 1, 1.0)
    assert [each.is_fused for each in found] == [True, False]
    assert found[0].sent == found[1].sent
    check(found, vocabulary, torch.bfloat16, 1.0)


def wrong_target(target: int) -> str:
    group = Mesh.join(Plan(tensor=2)).group("tensor")
    weight = nn.Parameter(torch.ones(6, WIDTH).bfloat16())
    logits = defer(torch.ones(1, 2, WIDTH).bfloat16(), weight, None, vocabulary_part(6, group, 11))
    try:
        vocabulary_cross_entropy(logits, torch.tensor([[0, target]]), group, 11)
    except IndexError as error:
        return str(error)
    return ""


def test_a_target_that_is_padding_is_an_error(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(wrong_target, 11) == ["a target is not in the vocabulary of 11"] * 2


def whole_loss_of_a_part() -> bool:
    group = Mesh.join(Plan(tensor=2)).group("tensor")
    weight = nn.Parameter(torch.ones(6, WIDTH).bfloat16())
    logits = defer(torch.ones(2, WIDTH).bfloat16(), weight, None, vocabulary_part(6, group, 11))
    return fused_cross_entropy(logits, torch.tensor([0, 1])) is None


def test_a_loss_of_whole_logits_does_not_take_parts_for_them(warm_ranks: Warm) -> None:
    assert all(warm_ranks(2).run(whole_loss_of_a_part))
