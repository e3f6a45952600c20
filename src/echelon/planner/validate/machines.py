"""The cluster of a published run: the device by name, the network by what the row says of it."""

import re
from dataclasses import replace

from echelon.errors import UserError
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.cluster.read import calibration, device_names, make_cluster
from echelon.planner.validate.columns import Row, integer, text

# Gigabits per second of a node, where a row names only the machine: BLOOM's paper (arXiv:2211.05100), 4
# Omni-Path links of 100 Gb/s.
_NETWORKS = (("Jean Zay", 400.0), ("BigScience", 400.0))
_A100_40 = re.compile(r"a100.*40 ?gb")


def cluster_of_row(row: Row) -> Cluster:
    """Return the cluster of a row. A UserError says that its device has no calibration."""
    name = device_of(text(row, "gpu"))
    cluster = make_cluster(calibration(name), integer(row, "n_gpus"))
    words = f"{text(row, 'gpu')} {text(row, 'note')} {row['source']}"
    nodes = re.search(r"\d+ nodes x (\d+)", words)
    if nodes and "NVL72" not in words:
        cluster = replace(cluster, per_node=int(nodes[1]))
    rate = re.search(r"(\d+)\s*Gb(?:ps|/s)(?: per node| node-node)", words)
    gigabits = float(rate[1]) if rate else next((rate for word, rate in _NETWORKS if word in words), 0.0)
    if gigabits:
        between = calibration(name)["between"]
        reached = between["bandwidth"] / between["wire"]
        bandwidth = reached * gigabits * 1e9 / 8 / cluster.per_node
        cluster = replace(cluster, between=cluster.between._replace(bandwidth=bandwidth))
    return cluster


def device_of(name: str) -> str:
    """The calibration for a device as a table spells it: 'DGX-GB200' → 'gb200', 'a100_80gb' → 'a100-80'."""
    key = name.lower()
    if "a100" in key:
        return "a100-40" if _A100_40.search(key) else "a100-80"
    found = [device for device in device_names() if device.removesuffix("x") in key]
    if not found:
        raise UserError(f"gpu={name!r}: has no calibration; there is one for {', '.join(device_names())}")
    return max(found, key=len)
