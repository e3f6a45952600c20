"""Bytes over links."""

from dataclasses import replace

import pytest

from echelon.planner.cluster.cluster import Cluster, Link
from echelon.planner.cluster.read import read_cluster
from echelon.planner.foresight.collectives import exchange_seconds, hop_seconds, ring_seconds


def without_latency() -> Cluster:
    return replace(read_cluster("h100:64"), inside=Link(400e9, 0.0), between=Link(50e9, 0.0))


def test_a_ring_moves_its_part_of_the_buffer() -> None:
    cluster = without_latency()
    assert ring_seconds(cluster, 8e9, 8) == pytest.approx(7 / 8 * 8e9 / 400e9)
    assert ring_seconds(cluster, 8e9, 8, passes=2) == pytest.approx(2 * ring_seconds(cluster, 8e9, 8))
    assert ring_seconds(cluster, 8e9, 8, stride=8) == pytest.approx(7 / 8 * 8e9 / 50e9)
    assert ring_seconds(cluster, 8e9, 1) == 0


def test_an_all_to_all_crosses_the_network_only_with_what_leaves_the_node() -> None:
    cluster = without_latency()
    assert exchange_seconds(cluster, 8e9, 8) == pytest.approx(7 / 8 * 8e9 / 400e9)
    assert exchange_seconds(cluster, 8e9, 16) == pytest.approx(8 / 16 * 8e9 / 50e9)
    assert exchange_seconds(cluster, 8e9, 1) == 0


def test_neighbours_in_a_node_send_over_its_links() -> None:
    cluster = without_latency()
    assert hop_seconds(cluster, 4e9, stride=4) == pytest.approx(4e9 / 400e9)
    assert hop_seconds(cluster, 4e9, stride=8) == pytest.approx(4e9 / 50e9)


def test_more_ranks_start_later() -> None:
    cluster = read_cluster("h100:4096")
    assert ring_seconds(cluster, 1.0, 4096, 8) > ring_seconds(cluster, 1.0, 16, 8)


def test_an_all_to_all_may_take_several_starts() -> None:
    cluster = read_cluster("h100:8")
    once, thrice = (exchange_seconds(cluster, 8.0, 8, starts=starts) for starts in (1.0, 3.0))
    assert once == pytest.approx(2 * cluster.inside.latency, rel=1e-3)
    assert thrice == pytest.approx(3 * once, rel=1e-3)
