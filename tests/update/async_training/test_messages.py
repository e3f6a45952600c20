"""What workers and server say to each other comes out as it went in."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from echelon.collectives import Ledger
from echelon.launching import Ranks
from echelon.update.async_training.messages import (
    Kind,
    Message,
    open_group,
    pack_log,
    recv_message,
    recv_tensors,
    send_message,
    send_tensors,
    unpack_log,
)
from echelon.update.update import Push
from tests.groups import QueueGroup, Queues

Warm = Callable[[int], Ranks]


def pair() -> tuple[QueueGroup, QueueGroup]:
    queues = Queues()
    return QueueGroup(queues, 0, 2, Ledger()), QueueGroup(queues, 1, 2, Ledger())


def test_a_log_survives_the_journey() -> None:
    log = [Push(0, 0, 0, 1), Push(3, 7, 5, 9)]
    assert unpack_log(pack_log(log)) == log
    assert unpack_log(pack_log([])) == []


@pytest.mark.parametrize(
    "message", [Message(Kind.PULL), Message(Kind.PUSH, 2**40, 1.5, -0.25, 1e-300), Message(Kind.LOST, 7)]
)
def test_a_message_survives_the_journey(message: Message) -> None:
    server, worker = pair()
    send_message(worker, message, 0)
    received = recv_message(server, 1)
    assert received == message
    assert (type(received.kind), type(received.number)) == (Kind, int)
    assert {move.subject for move in (*server.ledger.moves, *worker.ledger.moves)} == {"requests"}


def test_tensors_follow_in_order_and_are_counted_under_their_subject() -> None:
    server, worker = pair()
    sent = [torch.arange(3.0), torch.tensor([1, 0], dtype=torch.uint8), torch.arange(4).view(2, 2)]
    send_tensors(worker, sent, 0, "gradients")
    received = [torch.empty_like(tensor) for tensor in sent]
    recv_tensors(server, received, 1, "gradients")
    assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))
    assert [(m.operation, m.subject) for m in worker.ledger.moves] == [("send", "gradients")] * 3
    assert [(m.operation, m.subject) for m in server.ledger.moves] == [("recv", "gradients")] * 3
    recv_tensors(server, [], 1, "nothing")


def own_group() -> tuple[int, int, int]:
    """Of two groups of ranks, the one that this rank is in: its size, our number in it, and their sum."""
    rank = dist.get_rank()
    group = open_group([(0, 2), (1, 3)][rank % 2])
    number = torch.tensor([rank])
    dist.all_reduce(number, group=group)
    result = (group.size(), group.rank(), int(number))
    dist.destroy_process_group(group)
    return result


def test_a_rank_opens_the_group_that_it_is_in(warm_ranks: Warm) -> None:
    assert warm_ranks(4).run(own_group) == [(2, 0, 2), (2, 0, 4), (2, 1, 2), (2, 1, 4)]
