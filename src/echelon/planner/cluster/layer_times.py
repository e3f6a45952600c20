"""What a layer of a transformer takes on a processor beside its products: measured on one of each family.

A processor issues its kernels itself and computes nothing meanwhile, and its kernels between products are far
from the bandwidth of its memory: GELU and softmax compute. So a small layer says what a pass takes whatever
its size, a large one what its kernels reach, and AdamW on both what an update takes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from echelon.planner.cluster.cluster import Cluster
from echelon.planner.foresight.layer import layer_cost
from echelon.planner.foresight.practice import ECHELON_CPU
from echelon.planner.foresight.settings import Settings
from echelon.planner.foresight.sharing import update_bytes
from echelon.planner.shape.presets import shape_of

if TYPE_CHECKING:
    from echelon.models.blocks import Block
    from echelon.models.config import ModelConfig

_PRESETS = ("gpt-tiny", "llama-tiny")
_SEQUENCES, _LENGTH = 2, 128
_WIDTH, _LITTLE = 256, 32
_SECONDS = 0.06  # that one figure takes
_FP32 = Settings(precision="fp32", weight_bytes=4.0, gradient_bytes=4.0, optimizer_bytes=8.0)


class LayerTimes(NamedTuple):
    """Seconds of one layer: of a forward and a backward pass with one token, and with many; of AdamW on a
    layer with few weights, and with many."""

    one_token: float
    tokens: float
    few_weights: float
    weights: float


def measure_layers() -> list[LayerTimes]:
    """Measure a layer of each family, in float32."""
    return [_times(name) for name in _PRESETS]


def _times(name: str) -> LayerTimes:
    little, large = (_block(_config(name, width)) for width in (_LITTLE, _WIDTH))
    return LayerTimes(
        _pass_seconds(little, 1, 1, _LITTLE),
        _pass_seconds(large, _SEQUENCES, _LENGTH, _WIDTH),
        _update_seconds(little),
        _update_seconds(large),
    )


def typical_layers(ranks: Sequence[Sequence[LayerTimes]]) -> tuple[LayerTimes, ...]:
    """The medians of what ranks have measured."""
    return tuple(LayerTimes(*map(median, zip(*times, strict=True))) for times in zip(*ranks, strict=True))


def with_layers(cluster: Cluster, layers: Sequence[LayerTimes]) -> Cluster:
    """The cluster whose device does with layers what was measured."""
    shares = [_shares(cluster, name, times) for name, times in zip(_PRESETS, layers, strict=True)]
    kernels, update = (mean(share) for share in zip(*shares, strict=True))
    return replace(
        cluster,
        device=replace(
            cluster.device,
            kernels=kernels,
            update=update,
            host_layer=mean(each.one_token for each in layers) / 2,
            host_update=mean(each.few_weights for each in layers),
        ),
    )


def _shares(cluster: Cluster, name: str, times: LayerTimes) -> tuple[float, float]:
    """The shares of its bandwidth that a device reaches between products, and in an update."""
    shape = shape_of(_config(name, _WIDTH))
    devices = (replace(cluster.device, kernels=kernels) for kernels in (1.0, 0.5))
    usual, half = (
        cost.forward + cost.backward
        for cost in (
            layer_cost(shape, replace(cluster, device=each), ECHELON_CPU, _FP32, _SEQUENCES, _LENGTH, False)
            for each in devices
        )
    )
    between = half - usual  # what kernels between products would take at the whole bandwidth
    taken = times.tokens - times.one_token - (usual - between)
    updating = update_bytes(_FP32, shape.dense_layer_parameters) / cluster.device.bandwidth
    return _share(between, taken), _share(updating, times.weights - times.few_weights)


def _share(expected: float, taken: float) -> float:
    """At most 1, also where what was measured is less than what it is a part of."""
    return min(1.0, expected / taken) if taken > 0 else 1.0


def _config(name: str, width: int) -> "ModelConfig":
    from echelon.models import preset

    config = preset(name)
    ffn = None if config.ffn is None else 3 * width
    return replace(config, layers=1, width=width, ffn=ffn, heads=4, sequence=_LENGTH, vocab=64)


def _block(config: "ModelConfig") -> "Block":
    from echelon.models import build

    block = build(config).blocks[0]
    return cast("Block", block)


def _pass_seconds(block: "Block", sequences: int, length: int, width: int) -> float:
    inputs = torch.randn(sequences, length, width, requires_grad=True)
    gradient = torch.ones(sequences, length, width)
    return seconds_of(lambda: block(inputs).backward(gradient))


def _update_seconds(block: "Block") -> float:
    for parameter in block.parameters():
        parameter.grad = torch.ones_like(parameter)
    return seconds_of(torch.optim.AdamW(block.parameters(), lr=0.0).step)


def seconds_of(work: Callable[[], object], finish: Callable[[], None] = lambda: None) -> float:
    """The median seconds of a few rounds."""
    work()
    finish()
    times: list[float] = []
    while len(times) < 3 or sum(times) < _SECONDS:
        start = time.perf_counter()
        work()
        finish()
        times.append(time.perf_counter() - start)
    return max(median(times), 1e-9)
