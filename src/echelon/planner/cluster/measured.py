"""The processor of this machine as a device: `cpu:2` is two ranks here. Measured in about a second.

What ranks send each other goes through memory, which is all that is measured of their links. The figures hold
for as many threads as torch has in this process, while nothing else runs.
"""

import os
import time
from collections.abc import Callable

import torch

from echelon.planner.cluster.cluster import Cluster, Device, Link

_SIZE = 640  # of the square matrices
_COPIED = 2**26  # bytes: more than caches hold
_ROUNDS = 5
_TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Shares of what was measured: fused attention beside products, and a message that is written and read.
_ATTENTION, _MESSAGE = 0.4, 0.25
_LATENCY = 100e-6  # of a collective over shared memory: benchmarks/results/collectives.json has it by size


def measure_cpu(count: int) -> Cluster:
    """Return a cluster of `count` ranks on this machine's processor."""
    flops = {name: 2 * _SIZE**3 / _seconds_of_product(dtype) for name, dtype in _TYPES.items()}
    source, target = torch.zeros(_COPIED, dtype=torch.uint8), torch.zeros(_COPIED, dtype=torch.uint8)
    bandwidth = 2 * _COPIED / _best(lambda: target.copy_(source))
    small = torch.zeros(1)
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    device = Device(
        "cpu",
        memory / count,
        bandwidth,
        flops,
        cores=1,
        matrix=1.0,
        matrix_knee=1.0,
        attention=_ATTENTION,
        stream=1.0,
        launch=_best(lambda: small.add_(1)),
    )
    link = Link(_MESSAGE * bandwidth, _LATENCY)
    return Cluster(device, count, count, link, link, link, host_memory=memory, host_bandwidth=bandwidth)


def _seconds_of_product(dtype: torch.dtype) -> float:
    left, right = (torch.ones(_SIZE, _SIZE, dtype=dtype) for _ in range(2))
    return _best(lambda: left @ right)


def _best(work: Callable[[], object]) -> float:
    """The seconds of the fastest of a few rounds."""
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)
