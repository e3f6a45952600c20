"""The devices that the ranks of this process group have: by name, as calibrated, or else measured.

report = device_here()                    on every rank, at the same time
cluster = cluster_of_reports(reports)     on one of them, from the reports of all
"""

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from echelon.errors import UserError
from echelon.planner.cluster.cluster import Cluster, Device, Link
from echelon.planner.cluster.measured import GPU, PROCESSOR, Figures, cpu_cluster, measure, typical
from echelon.planner.cluster.read import calibration, device_of, make_cluster

# Of a GPU without calibration: PCIe 4.0 with 16 lanes, as large copies reach it, and 16 of its cores.
_PCIE = Link(20e9, 50e-6)
_CORES = 64


def device_here(device: torch.device, link: Link | None = None) -> dict[str, Any]:
    """What this rank's device is, as plain data. `link`: to the other ranks, if it was measured."""
    report: dict[str, Any] = {"host": socket.gethostname(), "link": link}
    if device.type != "cuda":
        return report | {"name": None, "figures": measure(device, PROCESSOR)}
    found = torch.cuda.get_device_properties(device)
    report |= {"name": found.name, "memory": float(found.total_memory), "cores": found.multi_processor_count}
    return report if _calibration(found.name) else report | {"figures": measure(device, GPU)}


def cluster_of_reports(reports: Sequence[Mapping[str, Any]]) -> Cluster:
    """The cluster of all ranks' devices; where they differ, of the one with the least memory."""
    count, first = len(reports), min(reports, key=lambda each: each.get("memory", 0.0))
    figures = [Figures(*each["figures"]) for each in reports if each.get("figures")]
    link = Link(*first["link"]) if first["link"] else None
    if first["name"] is None:
        return cpu_cluster(typical(figures), count, link)
    name = _calibration(first["name"])
    if name is not None:
        cluster = make_cluster(calibration(name), count)
    else:
        cluster = _measured_gpus(first, typical(figures), count, link or _PCIE)
    per_node = max(Counter(each["host"] for each in reports).values())
    return replace(cluster, per_node=per_node, device=replace(cluster.device, memory=first["memory"]))


def devices_here() -> int:
    """How many ranks this machine is for: one per GPU, or per core."""
    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def _calibration(name: str) -> str | None:
    try:
        return device_of(name)
    except UserError:
        return None


def _measured_gpus(report: Mapping[str, Any], figures: Figures, count: int, link: Link) -> Cluster:
    device = Device(
        report["name"],
        report["memory"],
        figures.stream,
        figures.flops,
        cores=report["cores"],
        matrix=1.0,
        matrix_knee=_CORES,
        attention=figures.attention / figures.flops["bf16"],
        stream=1.0,
        launch=figures.launch,
    )
    return Cluster(device, count, count, link, link, _PCIE)
