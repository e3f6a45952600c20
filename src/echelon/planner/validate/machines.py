"""The cluster of a published run: the device by name, the network by what the row says of it."""

import re
from dataclasses import replace

from echelon.planner.cluster.cluster import Cluster
from echelon.planner.cluster.read import calibration, device_of, make_cluster
from echelon.planner.validate.columns import Row, integer, text

# Gigabits per second of a node, where a row names only the machine: BLOOM's paper (arXiv:2211.05100), 4
# Omni-Path links of 100 Gb/s.
_NETWORKS = (("Jean Zay", 400.0), ("BigScience", 400.0))


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
