"""Gradients that travel to the owner of their block: all parts arrive, each once."""

import pytest
import torch

from echelon.collectives import RecordingGroup
from echelon.parallel.context.ring import ReturningGradients
from echelon.parallel.context.ring_exchange import RIGHT, WAYS, reach, rounds
from tests.nccl_like import NcclWorld
from tests.peak_memory import PeakMemory


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7])
def test_the_owner_has_the_parts_of_all_ranks(ranks: int) -> None:
    """Rank r's part for the block of rank s is 1 in row r: an owner must end with 1 in every row."""
    world = NcclWorld(ranks)

    def part(rank: int, source: int) -> torch.Tensor:
        parts = torch.zeros(ranks, ranks)
        parts[rank, source] = 1
        return parts

    def run(rank: int) -> torch.Tensor:
        group = world.group("context", range(ranks), rank)
        returning = ReturningGradients(group, part(rank, rank))
        for blocks in list(rounds(group, torch.zeros(1)))[1:]:
            returning.add({block.way: part(rank, block.source) for block in blocks})
        return returning.finish()

    for rank, gradients in enumerate(world.run(run)):
        expected = torch.zeros(ranks, ranks)
        expected[:, rank] = 1
        assert torch.equal(gradients, expected)


def test_what_was_sent_is_freed() -> None:
    """Beside a rank's own gradients there are two that it has computed, two that go and two that come."""
    ranks, own = 9, torch.ones(1000)
    returning = ReturningGradients(RecordingGroup("context", 0, ranks), own)
    with PeakMemory() as memory:
        for _ in range(reach(ranks, RIGHT)):
            returning.add({way: torch.zeros(1000) for way in WAYS})
        returning.finish()
    assert memory.peak == 6 * own.nbytes
