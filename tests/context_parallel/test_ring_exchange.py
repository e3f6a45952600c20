"""The order of messages in a ring: it must not block where a rank's messages run one after the other."""

from collections import deque

import pytest
import torch

from echelon.collectives import RecordingGroup
from echelon.context_parallel import ring_attention
from echelon.context_parallel.ring_exchange import rounds, start_exchange


def messages(rank: int, ranks: int) -> deque[tuple[str, int]]:
    """What a rank sends and receives, in order, in a forward and a backward pass: (operation, peer)."""
    group = RecordingGroup("context", rank, ranks)
    x = torch.zeros(1, 1, 2, 1, requires_grad=True)
    ring_attention(x, x, x, group).sum().backward()
    peers = {"send": (rank + 1) % ranks, "recv": (rank - 1) % ranks}
    return deque((move.operation, peers[move.operation]) for move in group.ledger.moves)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_messages_that_go_one_after_the_other_do_not_block(ranks: int) -> None:
    """As over NCCL: nothing of a rank goes on before what it began earlier, and a send needs its receiver."""
    queues = [messages(rank, ranks) for rank in range(ranks)]
    assert {len(queue) for queue in queues} == {6 * (ranks - 1)}
    while any(queues):
        pairs = [
            (rank, queue[0][1])
            for rank, queue in enumerate(queues)
            if queue and queue[0][0] == "send" and (peer := queues[queue[0][1]]) and peer[0] == ("recv", rank)
        ]
        assert pairs, f"blocked: {[queue[0] if queue else None for queue in queues]}"
        for pair in pairs:
            for rank in pair:
                queues[rank].popleft()


def test_the_next_tensor_travels_while_one_is_used() -> None:
    group = RecordingGroup("context", rank=1, size=3)
    seen = [(source, len(group.ledger.moves)) for source, _ in rounds(group, torch.zeros(2))]
    assert seen == [(1, 2), (0, 4), (2, 4)]


def test_a_tensor_is_kept_until_it_is_sent() -> None:
    tensor = torch.zeros(2)
    assert start_exchange(RecordingGroup("context", 0, 2), tensor).outgoing is tensor
