"""Blocks of attention by kernels and in tiles: the same, and results over several blocks merge."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from echelon.parallel.context import blocks
from echelon.parallel.context.blocks import (
    CPU_FLASH,
    Gradients,
    Kernel,
    QueryState,
    add_gradients,
    attend,
    find_kernel,
    merge,
)
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


# Attention in tiles against torch's own, whatever the size of a tile.


@pytest.fixture(params=[1, 2, 3, 256])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_MAX_ROWS", request.param)


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
        out, sums = blocks._attend_in_tiles(query, key, value, causal=causal, scale=0.3)
        into = Gradients(*(torch.zeros_like(x) for x in (query, key, value)))
        queries = QueryState(query, gradient, out, sums)
        blocks._add_gradients_in_tiles(into, queries, key, value, causal=causal, scale=0.3)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-13)
    for made, like in zip(into, (query, key, value), strict=True):
        torch.testing.assert_close(made, like.grad, rtol=0, atol=1e-13)


def test_large_scores_do_not_overflow() -> None:
    query = torch.full((1, 1, 2, 1), 1e3)
    out, sums = blocks._attend_in_tiles(query, query, query, causal=True, scale=1.0)
    assert torch.equal(out, query)
    assert sums.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_accumulated_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = (drawn(1, 2, 64, 8).to(dtype) for _ in range(3))
    out, sums = blocks._attend_in_tiles(query, key, value, causal=True, scale=0.3)
    wanted = F.scaled_dot_product_attention(
        *(x.double() for x in (query, key, value)), is_causal=True, scale=0.3
    )
    assert out.dtype == sums.dtype == torch.float32
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=3e-6)


def test_tiles_hold_a_bounded_number_of_scores() -> None:
    query, key = torch.empty(2, 4, 1 << 20, 1, device="meta"), torch.empty(2, 2, 1 << 16, 1, device="meta")
    sizes = {2 * 4 * (rows.stop - rows.start) * seen for rows, seen in blocks._tiles(query, key, False)}
    assert max(sizes) <= blocks._MAX_SCORES
    few = list(blocks._tiles(query[:, :, :700], key[:, :, :700], True))
    assert few == [(slice(0, 256), 256), (slice(256, 512), 512), (slice(512, 700), 700)]


# torch's kernels: which one computes what, and that its arguments are those of this version of torch.


FLASH, CUDNN = (
    blocks._CUDA_KERNELS[x.value] for x in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
)


def on(device: str, dtype: torch.dtype, width: int, heads: int = 4) -> Any:
    """What of a tensor the choice looks at: there need not be such a device."""
    return SimpleNamespace(device=torch.device(device), dtype=dtype, shape=torch.Size([1, heads, 8, width]))


@pytest.mark.parametrize(
    ("device", "dtype", "width", "expected"),
    [
        ("cpu", torch.float64, 3, CPU_FLASH),
        ("cpu", torch.float32, 3, CPU_FLASH),
        ("cpu", torch.bfloat16, 64, None),  # its backward pass is slower and less precise than tiles
        ("cuda", torch.bfloat16, 64, FLASH),
        ("cuda", torch.float16, 128, FLASH),
        ("cuda", torch.float32, 64, None),
        ("cuda", torch.float64, 64, None),
        ("cuda", torch.bfloat16, 20, None),  # not a multiple of 8
        ("cuda", torch.bfloat16, 256, None),
        ("meta", torch.bfloat16, 64, None),
    ],
)
def test_device_and_type_choose_the_kernel(
    device: str, dtype: torch.dtype, width: int, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: SDPBackend.FLASH_ATTENTION.value)
    tensor = on(device, dtype, width)
    assert find_kernel(tensor, tensor, tensor, causal=True) is expected


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (SDPBackend.FLASH_ATTENTION, FLASH),
        (SDPBackend.CUDNN_ATTENTION, CUDNN),
        (SDPBackend.EFFICIENT_ATTENTION, None),
        (SDPBackend.MATH, None),
    ],
)
def test_a_gpu_uses_what_torch_would(
    backend: SDPBackend, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def choose(*_: Any, **options: Any) -> int:
        asked.append(options)
        return backend.value

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    query, key = on("cuda", torch.bfloat16, 64), on("cuda", torch.bfloat16, 64, heads=2)
    assert find_kernel(query, key, key, causal=False) is expected
    assert asked == [{"is_causal": False, "enable_gqa": True}]


@pytest.mark.parametrize("kernel", [FLASH, CUDNN], ids=["flash", "cudnn"])
@pytest.mark.parametrize("causal", [True, False])
def test_gpu_kernels_take_these_arguments(kernel: Any, causal: bool) -> None:
    """On the meta device, where operations check their arguments and compute nothing but shapes."""
    query = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16, device="meta")
    key = torch.empty(2, 4, 16 if causal else 8, 64, dtype=torch.bfloat16, device="meta")
    out, sums = kernel.forward(query, key, key, causal, 0.3)
    assert (out.shape, sums.shape) == (query.shape, query.shape[:3])
    gradients = kernel.backward(QueryState(query, out, out, sums), key, key, causal, 0.3)
    assert [x.shape for x in gradients] == [query.shape, key.shape, key.shape]
