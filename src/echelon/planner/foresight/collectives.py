"""Seconds of collectives: the bytes that a ring moves over its slowest link, and a start that grows slowly.

operation        bytes per rank, of a buffer of S bytes
all-reduce       2(n−1)/n · S
all-gather       (n−1)/n · S       (S: the whole that each rank has afterwards)
reduce-scatter   (n−1)/n · S
all-to-all       (n−1)/n · S       of which only what leaves the node crosses the network
"""

from math import log2

from echelon.planner.cluster.cluster import Cluster


def ring_seconds(cluster: Cluster, size: float, ranks: int, stride: int = 1, passes: int = 1) -> float:
    """Seconds of an all-gather or a reduce-scatter of `size` bytes; of an all-reduce with `passes=2`."""
    if ranks <= 1 or not size:
        return 0.0
    bandwidth, latency = cluster.link(ranks, stride)
    # An all-reduce has trees for short messages; the others pass each part around the whole ring.
    start = latency * (1 + (log2(ranks) if passes == 2 else ranks / 16)) / 2
    return passes * (start + (ranks - 1) / ranks * size / bandwidth)


def exchange_seconds(
    cluster: Cluster, size: float, ranks: int, stride: int = 1, starts: float = 1.0
) -> float:
    """Seconds of an all-to-all in which each rank has `size` bytes to send, and which takes as many `starts`
    of an all-reduce."""
    if ranks <= 1 or not size:
        return 0.0
    members = cluster.members(ranks, stride)
    inside = size * (members - 1) / ranks / cluster.inside.bandwidth
    between = size * (ranks - members) / ranks / cluster.between.bandwidth
    latency = (cluster.inside if members >= ranks else cluster.between).latency
    return starts * latency * (1 + log2(ranks)) / 2 + max(inside, between)


def hop_seconds(cluster: Cluster, size: float, stride: int) -> float:
    """Seconds of one message to the rank that is `stride` further."""
    link = cluster.inside if stride < cluster.per_node else cluster.between
    return link.latency + size / link.bandwidth
