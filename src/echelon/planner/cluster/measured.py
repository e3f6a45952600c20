"""What a device that has no calibration can do, measured in about a second: above all, this processor.

Each rank measures while the others do, so that they share cores and memory as in a training. Kernels write
to memory that is new each time, as those of a step do.
"""

import os
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from echelon.planner.cluster.cluster import Cluster, Device, Link
from echelon.planner.cluster.layer_times import (
    LayerTimes,
    measure_layers,
    seconds_of,
    typical_layers,
    with_layers,
)

_TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PROCESS = 0.3e9  # bytes of a rank before it holds a model
_MESSAGE = 0.25  # of the bandwidth: a message is written and read by both
_LATENCY = 100e-6  # of a collective over shared memory: benchmarks/results/collectives.json has it by size


class Sizes(NamedTuple):
    """How much work shows what a device can do: rows of a product, its width, numbers of a stream."""

    rows: int
    width: int
    numbers: int


PROCESSOR, GPU = Sizes(512, 256, 2**20), Sizes(8192, 4096, 2**27)


class Figures(NamedTuple):
    """Operations per second of products by type, and of fused attention; bytes per second of kernels that
    only read and write; seconds of an operation on one number. `layers`: of a processor."""

    flops: dict[str, float]
    attention: float
    stream: float
    launch: float
    layers: Sequence[LayerTimes] = ()


def measure(device: torch.device, sizes: Sizes = PROCESSOR) -> Figures:
    """Measure a device of this process, with as many threads as torch has in it."""
    is_gpu = device.type == "cuda"
    finish = torch.cuda.synchronize if is_gpu else lambda: None
    one = torch.zeros(1, device=device)
    numbers = torch.zeros(sizes.numbers, device=device)
    stream = 12 * sizes.numbers / seconds_of(lambda: numbers + numbers, finish)
    return Figures(
        {name: _product_rate(sizes, dtype, device, finish) for name, dtype in _TYPES.items()},
        _attention_rate(sizes, torch.bfloat16 if is_gpu else torch.float32, device, finish),
        stream,
        seconds_of(lambda: one + one, finish),
        () if is_gpu else measure_layers(),
    )


def typical(figures: list[Figures]) -> Figures:
    """The median of what ranks have measured: one that was disturbed does not count."""
    attention, stream, launch = (
        median(getattr(each, name) for each in figures) for name in ("attention", "stream", "launch")
    )
    flops = {name: median(each.flops[name] for each in figures) for name in figures[0].flops}
    return Figures(flops, attention, stream, launch, typical_layers([each.layers for each in figures]))


def cpu_cluster(figures: Figures, count: int, link: Link | None = None) -> Cluster:
    """The cluster of `count` ranks on this machine's processor. What ranks send each other goes through
    memory: of a link that was not measured, that is all that is known."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    device = Device(
        "cpu",
        memory / count,
        figures.stream,
        figures.flops,
        cores=1,
        matrix=1.0,
        matrix_knee=1.0,
        attention=figures.attention / figures.flops["fp32"],
        stream=1.0,
        launch=figures.launch,
        reserve=_PROCESS,
    )
    link = link or Link(_MESSAGE * figures.stream, _LATENCY)
    cluster = Cluster(
        device, count, count, link, link, link, host_memory=memory, host_bandwidth=figures.stream
    )
    return with_layers(cluster, figures.layers) if figures.layers else cluster


def _product_rate(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, finish: Callable[[], None]
) -> float:
    rows, width = sizes.rows, sizes.width
    inputs = torch.ones(rows, width, dtype=dtype, device=device)
    weights = torch.ones(3 * width, width, dtype=dtype, device=device)
    return 6 * rows * width**2 / seconds_of(lambda: nn.functional.linear(inputs, weights), finish)


def _attention_rate(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, finish: Callable[[], None]
) -> float:
    """Of causal attention, whose masked half is not counted."""
    heads, length, width = 8, sizes.rows // 2, sizes.width // 4
    query = torch.ones(1, heads, length, width, dtype=dtype, device=device)

    def attend() -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)

    return 2 * heads * length**2 * width / seconds_of(attend, finish)
