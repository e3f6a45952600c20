"""Blocks of attention by kernels and in tiles: the same, and results over several blocks merge."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.parallel.context import ring as blocks
from echelon.parallel.context.flash import CPU_FLASH, Kernel
from echelon.parallel.context.ring import add_gradients, attend, merge
from echelon.parallel.context.tiles import Gradients, QueryState
from tests.parallel.context.precision import MOST_ERROR, Shape, by_torch, errors, in_ring, inputs


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def in_tiles(*_: object, **__: object) -> Kernel | None:
    return None


@pytest.mark.parametrize("tiled", ["none", "forward", "backward", "both"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_blocks_together_are_attention(tiled: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last 4 positions attend to the 3 before them, and to themselves."""
    torch.manual_seed(0)
    query, gradient = drawn(2, 4, 4, 8), drawn(2, 4, 4, 8)
    key, value = (drawn(2, kv_heads, 7, 8).requires_grad_() for _ in range(2))
    mask = torch.ones(4, 7, dtype=torch.bool).tril(3)
    query.requires_grad_()
    wanted = F.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
    wanted.backward(gradient)
    sides = [(slice(3, 7), True), (slice(0, 3), False)]

    choose = blocks.find_kernel
    with torch.no_grad():
        monkeypatch.setattr(blocks, "find_kernel", choose if tiled in ("none", "backward") else in_tiles)
        results = [
            attend(query, key[:, :, at], value[:, :, at], causal=causal, scale=0.3) for at, causal in sides
        ]
        (out, sums), other = results
        merge(out, sums, *other)
        monkeypatch.setattr(blocks, "find_kernel", choose if tiled in ("none", "forward") else in_tiles)
        into = Gradients(*(torch.zeros_like(x) for x in (query, key, value)))
        for at, causal in sides:
            part = Gradients(into.query, into.key[:, :, at], into.value[:, :, at])
            state = QueryState(query, gradient, out, sums)
            add_gradients(part, state, key[:, :, at], value[:, :, at], causal=causal, scale=0.3)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-13)
    for made, like in zip(into, (query, key, value), strict=True):
        torch.testing.assert_close(made, like.grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", [Shape(4, 2, 256), Shape(4, 2, 200, width=128, transposed=True)])
def test_a_kernel_in_bfloat16_is_as_precise_in_a_ring_as_alone(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, by the kernel of the CPU."""
    monkeypatch.setattr(blocks, "find_kernel", lambda *_, **__: CPU_FLASH)
    tensors = inputs(shape, torch.bfloat16, "cpu")
    exact = by_torch(tensors, torch.float64)
    expected, found = errors(by_torch(tensors, torch.bfloat16), exact), errors(in_ring(tensors), exact)
    for in_blocks, alone in zip(found, expected, strict=True):
        assert in_blocks <= MOST_ERROR * alone, (found, expected)


def test_narrow_results_are_merged_in_the_wide_type() -> None:
    """As on a GPU: kernels return bfloat16. Weights of 2⁻¹² must not be lost."""
    out, sums = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1)
    small = torch.full((1, 1, 1), -12 * torch.log(torch.tensor(2.0)).item())
    for _ in range(64):
        merge(out, sums, torch.ones(1, 1, 1, 1, dtype=torch.bfloat16), small)
    assert out.item() == pytest.approx(64 / (4096 + 64), rel=1e-4)


def test_results_over_parts_of_the_keys_merge() -> None:
    torch.manual_seed(0)
    query, key, value = drawn(1, 2, 3, 4), drawn(1, 2, 9, 4), drawn(1, 2, 9, 4)
    scaled = {"causal": False, "scale": 20.0}  # one part may weigh next to nothing
    out, sums = attend(query, key[:, :, :4], value[:, :, :4], **scaled)
    merge(out, sums, *attend(query, key[:, :, 4:], value[:, :, 4:], **scaled))
    whole, whole_sums = attend(query, key, value, **scaled)
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-13)
    torch.testing.assert_close(sums, whole_sums, rtol=1e-14, atol=0)
