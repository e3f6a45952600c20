"""The devices that the ranks of this process group have: by name, as calibrated, or else measured.

report = device_here()                    on every rank, at the same time
cluster = cluster_of_reports(reports)     on one of them, from the reports of all
"""

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from echelon.collectives import Group, Ledger, group_over
from echelon.collectives.mesh import this_device
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.planner.cluster.cluster import Cluster, Device, Link
from echelon.planner.cluster.measured import GPU, PROCESSOR, Figures, cpu_cluster, measure, typical
from echelon.planner.cluster.read import calibration, device_of, make_cluster

# Of a GPU without calibration: PCIe 4.0 with 16 lanes, as large copies reach it, and 16 of its cores.
_PCIE = Link(20e9, 50e-6)
_CORES = 64
PROBE, _TIMES = 4 * 2**20, 5  # bytes of a large message, how often
_MOST_RANKS = 8  # that measure a processor; more only share its cores further


def report_of_rank() -> dict[str, Any]:
    """What this rank's device is, and its link to the others; all ranks call it at the same time."""
    device = this_device()
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    return device_here(device, None if is_alone else _measure_link(device))


def processor_cluster(count: int) -> Cluster:
    """A cluster of `count` ranks on this machine's processor, which started ranks measure."""
    started = min(count, _MOST_RANKS)
    with Ranks(started) as ranks:
        cluster = cluster_of_reports(ranks.run(report_of_rank))
    if started == count:
        return cluster
    share = started / count
    flops = {name: share * rate for name, rate in cluster.device.flops.items()}
    device = replace(
        cluster.device,
        flops=flops,
        bandwidth=share * cluster.device.bandwidth,
        memory=share * cluster.device.memory,
    )
    return replace(cluster, device=device, count=count, per_node=count)


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


def _measure_link(device: torch.device) -> Link:
    """The link between ranks, from sums of a small message and of a large one: see `ring_seconds`."""
    assert dist.group.WORLD is not None
    group = group_over("all", dist.group.WORLD, Ledger())
    try:
        messages = [torch.zeros(size // 4, device=device) for size in (4, PROBE)]
        small, large = (seconds_of(partial(group.all_reduce, each), group) for each in messages)
    finally:
        group.close()
    moved = 2 * (group.size - 1) / group.size * PROBE
    return Link(moved / max(large - small, 1e-9), small / 2)


def seconds_of(send: Callable[[], object], group: Group) -> float:
    """The median of a message that all ranks send together; the first one opens connections."""
    times = []
    for _ in range(1 + _TIMES):
        group.barrier()
        start = time.perf_counter()
        send()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[1:])
