"""Seconds of kernels on one device: products of matrices, fused attention, and what only reads and writes.

A product is cut into tiles, and the cores of the device take tiles in waves, so that time rises in steps:

    tiles   = ceil(m / tile_m) · ceil(n / tile_n) · split         (split: parts of k, for few tiles)
    seconds = ceil(tiles / cores) · tile_m · tile_n · 2 · (k / split + knee) / (rate / cores)

`knee` is the work of filling and emptying a tile, counted in steps of k. The fastest tile counts, as in the
libraries that choose among them. Below that: bytes over the bandwidth, and the launch.
"""

from functools import lru_cache
from math import ceil

from echelon.planner.cluster.cluster import Device

# (m, n) of a tile, and the share of the best rate that it reaches: smaller ones read each number more often.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.65))
_SPLITS = (1, 2, 4, 8)
_LEAST_SPLIT = 512  # of k: shorter parts are not worth the sum over them

_USUAL_WIDTH = 128  # of a head, for which `Device.attention` is
# Of one core in a second: 16 in a cycle of about 1.7 GHz, in GPUs from Volta to Blackwell. Shah et al. 2024
# (arXiv:2407.08608), section 3.1, says what that means: 3.9e12 beside 989e12 operations of products on H100.
_EXPONENTIALS = 16 * 1.7e9

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 0.5}
_NARROW = {"fp8", "fp4"}

# Share of the best rate, by the bytes that the length of a row is a multiple of.
_ALIGNED = ((128, 1.0), (64, 0.95), (32, 0.85), (16, 0.7), (1, 0.4))


def _alignment(precision: str, n: int, k: int) -> float:
    size = int(BYTES[precision] or 1) or 1
    worst = 1.0
    for length in (n, k):
        worst = min(worst, next(share for unit, share in _ALIGNED if length * size % unit == 0))
    return worst


@lru_cache(maxsize=100_000)
def product_seconds(device: Device, precision: str, m: int, n: int, k: int) -> float:
    """Seconds of one product [m, k]·[k, n]."""
    share = device.matrix * {"fp8": device.fp8, "fp4": device.fp4}.get(precision, 1.0)
    rate = device.rate(precision) * share * _alignment(precision, n, k) / device.cores  # of one core
    knee, cores = device.matrix_knee, device.cores
    best = float("inf")
    for tile_m, tile_n, quality in _TILES:
        tiles = ceil(m / tile_m) * ceil(n / tile_n)
        work = 2.0 * tile_m * tile_n / (rate * quality)
        for split in _SPLITS:
            if split > 1 and k < split * _LEAST_SPLIT:
                break
            best = min(best, ceil(tiles * split / cores) * work * (k / split + knee))
    size = BYTES[precision] * (m * k + k * n) + 2.0 * m * n
    return device.launch + max(best, stream_seconds(device, size))


def stream_seconds(device: Device, size: float) -> float:
    """Seconds of kernels that read and write so many bytes."""
    return size / (device.bandwidth * device.stream)


def attention_seconds(device: Device, precision: str, flops: float, width: float = _USUAL_WIDTH) -> float:
    """Seconds of fused attention, forward, of heads so wide. Its products stay in 16 bits where matrices are
    narrower. Each score takes an exponential, whatever the width: for few numbers it weighs more."""
    rate = device.rate("bf16" if precision in _NARROW else precision)
    exponential = rate / (4.0 * device.cores * _EXPONENTIALS)  # as many numbers of a head take as long
    share = device.attention * (1 + exponential / _USUAL_WIDTH) / (1 + exponential / width)
    return device.launch + flops / (rate * share)
