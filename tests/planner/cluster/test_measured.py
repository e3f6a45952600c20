"""This machine's processor as a device."""

import pytest
import torch

from echelon.planner.cluster.measured import Figures, cpu_cluster, measure, typical
from echelon.planner.cluster.read import read_cluster
from echelon.planner.foresight.predict import predict
from echelon.planner.shape.presets import preset_shape


@pytest.mark.slow
def test_the_processor_is_measured() -> None:
    figures = measure(torch.device("cpu"))
    assert set(figures.flops) == {"fp64", "fp32", "bf16", "fp16"}
    assert figures.flops["fp32"] > 1e8
    assert figures.stream > 1e8
    cluster = cpu_cluster(figures, 2)
    assert (cluster.device.name, cluster.count, cluster.nodes) == ("cpu", 2, 1)
    assert cluster.device.memory == cluster.host_memory / 2


def test_what_most_ranks_measured_counts() -> None:
    one = Figures({"fp32": 1.0, "bf16": 1.0}, 1.0, 1.0, 1.0)
    other = Figures({"fp32": 9.0, "bf16": 9.0}, 9.0, 9.0, 9.0)
    assert typical([one, other, one]) == one


def test_plans_are_predicted_for_it() -> None:
    figures = Figures(dict.fromkeys(("fp64", "fp32", "bf16", "fp16"), 50e9), 20e9, 8e9, 5e-6)
    alone, two = (
        predict(preset_shape("llama-tiny"), f"data={ranks}", cpu_cluster(figures, 2), 8).step_seconds
        for ranks in (1, 2)
    )
    assert 0 < two < alone


def test_norms_of_a_processor_save_what_fused_ones_do_not() -> None:
    shape = preset_shape("llama-tiny")
    here, there = (predict(shape, "data=1", read_cluster(name), 8).memory[0] for name in ("cpu:1", "h100:1"))
    norms = (2 * shape.layers + 1) * 6 * shape.hidden * 8 * shape.sequence
    assert here.activations == there.activations + norms
    assert here.states == there.states
