"""Edges: who talks over which group, and that every pair of ranks can be connected."""

import itertools

import pytest
import torch

from echelon.collectives import Edge, RecordingGroup, disjoint_pairs, edges_over


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("ring", [False, True])
def test_sets_are_disjoint_complete_and_few(ranks: int, ring: bool) -> None:
    neighbours = [(rank, rank + 1) for rank in range(ranks - 1)] + [(ranks - 1, 0)] * ring
    pairs = {way for a, b in neighbours for way in ((a, b), (b, a))}
    sets = disjoint_pairs(pairs)
    assert sorted(pair for each in sets for pair in each) == sorted(pairs)
    for each in sets:
        members = [rank for pair in each for rank in pair]
        assert len(members) == len(set(members))
    assert len(sets) <= 6, "whatever the number of ranks"


def test_all_pairs_of_many_replicas_are_found() -> None:
    pairs = list(itertools.permutations(range(5), 2))
    assert sorted(pair for each in disjoint_pairs(pairs) for pair in each) == sorted(pairs)


def test_one_group_serves_all_edges_and_tensors_of_a_device_have_their_heads_on_the_host() -> None:
    group = RecordingGroup("pipeline", 1, 3)
    on_cpu = edges_over(group, torch.device("cpu"))
    assert on_cpu.outgoing == on_cpu.incoming == {0: Edge(group, 0), 2: Edge(group, 2)}
    on_gpu = edges_over(group, torch.device("cuda"))
    assert on_gpu.outgoing == {0: Edge(group, 0, Edge(group, 0)), 2: Edge(group, 2, Edge(group, 2))}
