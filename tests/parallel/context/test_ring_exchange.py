"""Messages around a ring in both directions: who gets what in which round, and when it travels."""

import pytest
import torch
from torch import Tensor

from echelon.collectives import Group, RecordingGroup
from echelon.parallel.context.ring_exchange import LEFT, RIGHT, Message, reach, rounds, start_exchange
from tests.nccl_like import NcclWorld
from tests.peak_memory import PeakMemory


def sources(ranks: int) -> list[list[list[int]]]:
    """By rank and round: the sources, and what they sent must be theirs."""
    world = NcclWorld(ranks)

    def run(rank: int) -> list[list[int]]:
        group = world.group("context", range(ranks), rank)
        own = torch.full((2,), rank)
        return [[_checked(*block[1:]) for block in blocks] for blocks in rounds(group, own)]

    return world.run(run)


def _checked(source: int, tensor: Tensor) -> int:
    assert tensor.tolist() == [source, source]
    return source


def test_blocks_come_from_both_sides() -> None:
    assert sources(5)[:2] == [[[0], [4, 1], [3, 2]], [[1], [0, 2], [4, 3]]]
    assert sources(4)[:2] == [[[0], [3, 1], [2]], [[1], [0, 2], [3]]]
    assert sources(2) == [[[0], [1]], [[1], [0]]]
    assert sources(1) == [[[0]]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_every_block_comes_once_and_half_of_them_each_way(ranks: int) -> None:
    for rank, by_round in enumerate(sources(ranks)):
        assert sorted(source for blocks in by_round for source in blocks) == list(range(ranks)), rank
    assert reach(ranks, RIGHT) + reach(ranks, LEFT) == ranks - 1
    assert reach(ranks, RIGHT) - reach(ranks, LEFT) in (0, 1)


def test_the_next_blocks_travel_while_some_are_used() -> None:
    group = RecordingGroup("context", rank=1, size=5)
    seen = [
        ([block.source for block in blocks], len(group.ledger.moves)) for blocks in rounds(group, _ones())
    ]
    assert seen == [([1], 1), ([0, 2], 2), ([4, 3], 2)]
    assert [move.traffic.sent for move in group.ledger.moves] == [2 * _ones().nbytes] * 2


def _ones() -> Tensor:
    return torch.ones(2)


def test_two_messages_between_two_ranks_keep_their_order() -> None:
    """Of gradients in a ring of 4: one goes on to the neighbour, the other one belongs to it."""
    world = NcclWorld(4)

    def run(rank: int) -> list[float]:
        group: Group = world.group("context", range(4), rank)
        right, left = (rank + 1) % 4, (rank - 1) % 4
        messages = [Message(torch.tensor([10.0 * rank + which]), right, left) for which in range(2)]
        return [tensor.item() for tensor in start_exchange(group, messages).wait()]

    assert world.run(run) == [[30.0, 31.0], [0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]


def test_a_tensor_is_kept_until_it_is_sent() -> None:
    tensor = torch.zeros(2)
    exchange = start_exchange(RecordingGroup("context", 0, 2), [Message(tensor, 1, 1)])
    assert exchange.outgoing.data_ptr() == tensor.data_ptr()


def test_what_was_sent_is_freed() -> None:
    """Beside a rank's own tensor there are two that it uses, two that it sends and two that come."""
    own = torch.ones(1000)
    with PeakMemory() as memory:
        for blocks in rounds(RecordingGroup("context", 0, 8), own):
            del blocks
    assert memory.peak == 6 * own.nbytes
