"""Groups of ranks, and the links that their rings cross."""

from dataclasses import replace

import pytest

from echelon.errors import UserError
from echelon.planner.cluster.cluster import Link
from echelon.planner.cluster.read import read_cluster


def test_a_ring_in_a_node_uses_its_links_and_one_across_nodes_all_cards_of_its_ranks() -> None:
    cluster = read_cluster("a100-80:64")
    assert cluster.nodes == 8
    assert cluster.link(8) == cluster.inside
    assert cluster.link(8, stride=8) == cluster.between  # one rank in each node
    pair = cluster.link(16, stride=4)  # two in each node
    assert pair.bandwidth == 2 * cluster.between.bandwidth
    assert cluster.link(64).bandwidth == pytest.approx(8 * cluster.between.bandwidth)


def test_a_ring_across_nodes_is_never_faster_than_within_one() -> None:
    cluster = replace(read_cluster("a100-80:64"), between=Link(1e12, 1e-6))
    assert cluster.link(64).bandwidth == cluster.inside.bandwidth


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    assert Link(1e9, 1e-6).seconds(1e9, messages=2) == pytest.approx(1.000002)


def test_a_cluster_without_devices_is_refused() -> None:
    with pytest.raises(UserError, match="at least 1") as refusal:
        replace(read_cluster("h100:8"), count=0, per_node=0)
    assert len(refusal.value.errors) == 2


def test_a_device_without_a_type_says_so() -> None:
    with pytest.raises(UserError, match="precision=fp4"):
        read_cluster("h100").device.rate("fp4")
