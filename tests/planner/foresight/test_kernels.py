"""Products, attention, and what only reads and writes."""

import pytest

from echelon.planner.cluster.read import read_cluster
from echelon.planner.foresight.kernels import attention_seconds, product_seconds, stream_seconds

DEVICE = read_cluster("a100-80").device


def efficiency(m: int, n: int, k: int, precision: str = "bf16") -> float:
    return 2 * m * n * k / product_seconds(DEVICE, precision, m, n, k) / DEVICE.flops["bf16"]


def test_large_products_reach_their_share_and_small_ones_less() -> None:
    assert efficiency(8192, 8192, 8192) == pytest.approx(DEVICE.matrix, rel=0.1)
    assert efficiency(512, 512, 512) < efficiency(2048, 2048, 2048) < efficiency(8192, 8192, 8192)


def test_one_tile_more_than_a_wave_costs_a_wave() -> None:
    whole = 12 * 128 * 9  # 108 tiles of 128 · 128, one for each core
    assert efficiency(12 * 128, 9 * 128, 8192) > 1.2 * efficiency(12 * 128, 9 * 128 + 128, 512)
    assert whole == 108 * 128


def test_rows_that_are_not_aligned_are_slow() -> None:
    assert efficiency(4096, 50257, 4096) < 0.6 * efficiency(4096, 50304, 4096)


def test_a_thin_product_takes_as_long_as_its_bytes() -> None:
    size = 2 * (8192 + 8192 * 8192 + 8192)
    assert product_seconds(DEVICE, "bf16", 1, 8192, 8192) >= stream_seconds(DEVICE, size)


def test_narrow_numbers_are_faster_but_not_in_attention() -> None:
    device = read_cluster("h100").device
    wide, narrow = (product_seconds(device, each, 8192, 8192, 8192) for each in ("bf16", "fp8"))
    assert 0.5 < narrow / wide < 0.6
    assert attention_seconds(device, "fp8", 1e12) == attention_seconds(device, "bf16", 1e12)


def test_narrow_heads_take_longer_for_as_many_operations() -> None:
    narrow, usual, wide = (attention_seconds(DEVICE, "bf16", 1e12, width) for width in (64, 128, 256))
    assert narrow > usual > wide
    # FlashAttention-2 on A100, forward, causal: 192 and 222 TFLOP/s (arXiv:2307.08691, figure 5).
    assert narrow / usual == pytest.approx(222 / 192, rel=0.05)
