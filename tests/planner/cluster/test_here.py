"""The cluster of ranks that are here, from what each says of its device."""

from typing import Any

import pytest
import torch

from echelon.planner.cluster.cluster import Link
from echelon.planner.cluster.here import cluster_of_reports, device_here, devices_here, processor_cluster
from echelon.planner.cluster.measured import Figures
from echelon.planner.cluster.read import calibration, read_cluster

FIGURES = Figures(dict.fromkeys(("fp64", "fp32", "bf16", "fp16"), 1e12), 1e11, 1e10, 5e-6)


def gpu(name: str, host: str = "a", memory: float = 80e9) -> dict[str, Any]:
    return {"host": host, "link": None, "name": name, "memory": memory, "cores": 100}


def test_a_processor_measures_itself() -> None:
    report = device_here(torch.device("cpu"), Link(1e9, 1e-4))
    cluster = cluster_of_reports([report, report])
    assert (cluster.device.name, cluster.count) == ("cpu", 2)
    assert cluster.inside == Link(1e9, 1e-4)
    assert cluster.device.flops["fp32"] > 1e8


def test_a_rank_that_was_disturbed_does_not_count() -> None:
    slow = FIGURES._replace(flops={name: rate / 100 for name, rate in FIGURES.flops.items()})
    reports = [
        {"host": "a", "link": None, "name": None, "figures": each} for each in (FIGURES, slow, FIGURES)
    ]
    assert cluster_of_reports(reports).device.flops == FIGURES.flops


def test_known_gpus_are_as_calibrated_with_the_memory_that_they_have() -> None:
    reports = [gpu("NVIDIA H100 80GB HBM3", host) for host in "aaaabbbb"]
    cluster = cluster_of_reports([*reports[:-1], gpu("NVIDIA H100 80GB HBM3", "b", 70e9)])
    assert (cluster.count, cluster.per_node, cluster.nodes) == (8, 4, 2)
    assert cluster.device.memory == 70e9
    assert cluster.device.matrix == calibration("h100")["matrix"]


def test_other_gpus_are_measured() -> None:
    report = gpu("NVIDIA GeForce RTX 4090") | {"figures": FIGURES}
    cluster = cluster_of_reports([report, report])
    assert cluster.device.flops == FIGURES.flops
    assert cluster.device.name == "NVIDIA GeForce RTX 4090"


@pytest.mark.slow
def test_ranks_measure_a_processor_and_more_of_them_share_it() -> None:
    with_two = read_cluster("cpu:2")
    assert (with_two.device.name, with_two.count, with_two.per_node) == ("cpu", 2, 2)
    assert with_two.inside.bandwidth > 1e6
    many = processor_cluster(16)
    assert (many.count, many.device.memory) == (16, many.host_memory / 16)


def test_this_machine_is_for_some_ranks() -> None:
    assert devices_here() >= 1
