"""Attention in tiles against torch's own, whatever the size of a tile."""

import pytest
import torch
import torch.nn.functional as F

from echelon.parallel.context import tiles
from echelon.parallel.context.tiles import Gradients, QueryState, add_gradients, attend


@pytest.fixture(params=[1, 2, 3, 256])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_MAX_ROWS", request.param)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("causal", [True, False])
def test_a_block_is_attention(causal: bool) -> None:
    torch.manual_seed(0)
    query = drawn(2, 4, 7, 5).requires_grad_()
    key, value = (drawn(2, 2, 7 if causal else 3, 5).requires_grad_() for _ in range(2))
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=0.3, enable_gqa=True)
    gradient = drawn(*wanted.shape)
    wanted.backward(gradient)
    with torch.no_grad():
        out, sums = attend(query, key, value, causal=causal, scale=0.3)
        into = Gradients(*(torch.zeros_like(x) for x in (query, key, value)))
        queries = QueryState(query, gradient, out, sums)
        add_gradients(into, queries, key, value, causal=causal, scale=0.3)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-13)
    for made, like in zip(into, (query, key, value), strict=True):
        torch.testing.assert_close(made, like.grad, rtol=0, atol=1e-13)


def test_large_scores_do_not_overflow() -> None:
    query = torch.full((1, 1, 2, 1), 1e3)
    out, sums = attend(query, query, query, causal=True, scale=1.0)
    assert torch.equal(out, query)
    assert sums.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_accumulated_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = (drawn(1, 2, 64, 8).to(dtype) for _ in range(3))
    out, sums = attend(query, key, value, causal=True, scale=0.3)
    wanted = F.scaled_dot_product_attention(
        *(x.double() for x in (query, key, value)), is_causal=True, scale=0.3
    )
    assert out.dtype == sums.dtype == torch.float32
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=3e-6)


def test_tiles_hold_a_bounded_number_of_scores() -> None:
    query, key = torch.empty(2, 4, 1 << 20, 1, device="meta"), torch.empty(2, 2, 1 << 16, 1, device="meta")
    sizes = {2 * 4 * (rows.stop - rows.start) * seen for rows, seen in tiles._tiles(query, key, False)}
    assert max(sizes) <= tiles._MAX_SCORES
    few = list(tiles._tiles(query[:, :, :700], key[:, :, :700], True))
    assert few == [(slice(0, 256), 256), (slice(256, 512), 512), (slice(512, 700), 700)]
