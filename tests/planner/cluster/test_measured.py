"""This machine's processor as a device."""

import torch

from echelon.planner.cluster.measured import measure_cpu
from echelon.planner.cluster.read import read_cluster
from echelon.planner.foresight.predict import predict
from echelon.planner.shape.presets import preset_shape


def test_the_processor_is_measured() -> None:
    cluster = measure_cpu(2)
    assert (cluster.device.name, cluster.count, cluster.nodes) == ("cpu", 2, 1)
    assert set(cluster.device.flops) == {"fp64", "fp32", "bf16", "fp16"}
    assert cluster.device.flops["fp32"] > 1e8
    assert cluster.device.bandwidth > 1e8
    assert cluster.device.memory == cluster.host_memory / 2
    assert torch.get_num_threads() >= 1


def test_plans_are_predicted_for_it() -> None:
    cluster = read_cluster("cpu:2")
    alone, two = (
        predict(preset_shape("llama-tiny"), f"data={ranks}", cluster, 8).step_seconds for ranks in (1, 2)
    )
    assert 0 < two < alone


def test_norms_of_a_processor_save_what_fused_ones_do_not() -> None:
    shape = preset_shape("llama-tiny")
    here, there = (predict(shape, "data=1", read_cluster(name), 8).memory[0] for name in ("cpu:1", "h100:1"))
    norms = (2 * shape.layers + 1) * 6 * shape.hidden * 8 * shape.sequence
    assert here.activations == there.activations + norms
    assert here.states == there.states
