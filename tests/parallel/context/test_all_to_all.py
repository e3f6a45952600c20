"""Attention by heads, against torch's attention over the whole sequence, between ranks that are threads."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.collectives import Group, RecordingGroup
from echelon.errors import UserError
from echelon.parallel.context import all_to_all_attention, put_together, take
from echelon.parallel.context.all_to_all import head_errors
from tests.nccl_like import NcclWorld


class Result(NamedTuple):
    tensors: list[Tensor]  # of this rank: the result, the gradients of query, key and value
    sent: tuple[int, int]  # bytes of the forward and of the backward pass


def whole(heads: int, kv_heads: int, length: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(7)
    shapes = [(2, each, length, 6) for each in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in shapes]


def attended(inputs: list[Tensor], group: Group, scale: float | None) -> Result:
    query, key, value, gradient = (take(x, group.rank, group.size, dim=2) for x in inputs)
    parts = [x.requires_grad_() for x in (query, key, value)]
    out = all_to_all_attention(query, key, value, group, scale)
    forward = group.ledger.total("context", subject="context").sent
    out.backward(gradient)
    both = group.ledger.total("context", subject="context").sent
    return Result([out.detach(), *(x.grad for x in parts if x.grad is not None)], (forward, both - forward))


def over_ranks(ranks: int, inputs: list[Tensor], scale: float | None = None) -> list[Result]:
    world = NcclWorld(ranks)
    return world.run(lambda rank: attended(inputs, world.group("context", range(ranks), rank), scale))


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"),
    [(1, 3, 1), (2, 4, 4), (2, 4, 2), (3, 6, 3), (2, 4, 1), (4, 8, 2), (4, 4, 1), (4, 16, 8)],
)
def test_it_is_attention_over_the_whole_sequence(ranks: int, heads: int, kv_heads: int) -> None:
    inputs = whole(heads, kv_heads, 6 * ranks)
    for scale in (None, 1.7):
        *tensors, gradient = [x.clone().requires_grad_() for x in inputs]
        out = F.scaled_dot_product_attention(
            tensors[0], tensors[1], tensors[2], is_causal=True, scale=scale, enable_gqa=True
        )
        out.backward(gradient.detach())
        expected = [out.detach(), *(x.grad for x in tensors)]
        by_rank = zip(*(result.tensors for result in over_ranks(ranks, inputs, scale)), strict=True)
        for values, parts in zip(expected, by_rank, strict=True):
            torch.testing.assert_close(put_together(parts, dim=2), values, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kv_heads", "repeated"), [(4, 4), (2, 4), (1, 4), (8, 8)])
def test_the_ledger_has_the_bytes_of_the_formula(kv_heads: int, repeated: int) -> None:
    ranks, heads, length = 4, 8, 16
    per_head = 2 * length // ranks * 6 * 8  # bytes of the local positions
    expected = (ranks - 1) * (2 * heads + 2 * repeated) * per_head // ranks
    for result in over_ranks(ranks, whole(heads, kv_heads, length)):
        assert result.sent == (expected, expected)


# --- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((6, 6, 4), "6 heads are not divisible by 4 ranks; use a context that divides 6, or attention=ring"),
        (
            (12, 12, 2, 4),
            "context=2 tensor=4: 12 heads are not divisible by 8 ranks; use a context that divides 3,",
        ),
        ((12, 4, 6), "4 key/value heads over 6 ranks are neither the same number for each rank nor one for"),
        (
            (8, 2, 2, 4),
            "tensor=4: 2 key/value heads are not divisible by tensor=4; use a tensor that divides 2",
        ),
        ((6, 2, 2, 4), "tensor=4: 6 heads are not divisible by tensor=4; use a tensor that divides 2"),
        ((24, 8, 3, 4), "use a context that divides 2 or is a multiple of it, or attention=ring"),
    ],
)
def test_heads_that_ranks_cannot_share(numbers: tuple[int, ...], words: str) -> None:
    (error,) = head_errors(*numbers)
    assert words in error


@pytest.mark.parametrize(
    "numbers", [(8, 8, 4), (8, 2, 4), (8, 4, 2), (8, 1, 8), (32, 8, 4, 2), (16, 2, 8, 2)]
)
def test_heads_that_ranks_can_share(numbers: tuple[int, ...]) -> None:
    assert head_errors(*numbers) == []


def test_heads_are_refused_before_anything_is_sent() -> None:
    group = RecordingGroup("context", 0, 4)
    query, key, value, _ = whole(6, 6, 8)
    with pytest.raises(UserError, match="6 heads are not divisible by 4 ranks"):
        all_to_all_attention(query, key, value, group)
    with pytest.raises(UserError, match=r"all-to-all attention(.|\n)*key and value of the same shape"):
        all_to_all_attention(query, key, value[:, :3], group)
    assert group.ledger.moves == []
