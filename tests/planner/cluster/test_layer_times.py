"""Layers on a processor."""

from dataclasses import replace

import pytest

from echelon.planner.cluster.cluster import Cluster, Device, Link
from echelon.planner.cluster.layer_times import LayerTimes, measure_layers, typical_layers, with_layers
from echelon.planner.foresight.predict import predict
from echelon.planner.shape.presets import preset_shape

LINK = Link(1e9, 1e-4)
DEVICE = Device("cpu", 1e10, 1e10, {"fp32": 1e11}, 1, matrix=1.0, matrix_knee=1.0, stream=1.0)
CLUSTER = Cluster(DEVICE, 1, 1, LINK, LINK, LINK)
TIMES = LayerTimes(one_token=1e-3, tokens=80e-3, few_weights=0.5e-3, weights=8.5e-3)


def test_layers_of_both_families_are_measured() -> None:
    for times in measure_layers():
        assert 0 < times.one_token < times.tokens
        assert 0 < times.few_weights < times.weights


def test_most_ranks_decide() -> None:
    slow = LayerTimes(1.0, 1.0, 1.0, 1.0)
    assert typical_layers([[TIMES], [slow], [TIMES]]) == (TIMES,)


def test_a_layer_takes_what_was_measured() -> None:
    device = with_layers(CLUSTER, [TIMES, TIMES]).device
    assert device.host_layer == TIMES.one_token / 2
    assert device.host_update == TIMES.few_weights
    # In float32 AdamW reads and writes two moments, the gradient and the weight are there once: 28 bytes, for
    # the 789,760 weights of GPT's layer and the 786,944 of Llama's, in 8 ms.
    assert device.update == pytest.approx(28 * (789_760 + 786_944) / 2 / 8e-3 / 1e10)
    slower = with_layers(CLUSTER, [TIMES._replace(tokens=160e-3)] * 2).device
    assert slower.kernels < device.kernels < 1


def test_noise_is_not_faster_than_memory() -> None:
    device = with_layers(CLUSTER, [LayerTimes(2e-3, 1e-3, 2e-3, 1e-3)] * 2).device
    assert (device.kernels, device.update) == (1.0, 1.0)


def test_slow_kernels_and_a_slow_host_make_a_step_longer() -> None:
    shape, measured = preset_shape("gpt-tiny"), with_layers(CLUSTER, [TIMES, TIMES])
    plain, layers = (predict(shape, "data=1", each, 8).seconds for each in (CLUSTER, measured))
    assert layers.compute > plain.compute
    assert layers.host - plain.host == pytest.approx(2 * shape.layers * TIMES.one_token / 2)
    assert layers.optimizer > plain.optimizer + shape.layers * TIMES.few_weights
    offloaded = replace(measured, host_memory=1e10)
    assert predict(shape, "data=1 offload=optimizer", offloaded, 8).seconds.optimizer == 0
