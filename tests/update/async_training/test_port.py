"""A worker's way to the server: the same answers, in one process or by messages."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from echelon.collectives import Ledger, Traffic
from echelon.launching import Ranks
from echelon.update.async_training import port
from echelon.update.async_training.port import (
    Kind,
    LocalPort,
    Message,
    Port,
    open_group,
    pack_log,
    recv_message,
    recv_tensors,
    send_message,
    send_tensors,
)
from echelon.update.async_training.server import ServerFailed
from echelon.update.update import Push
from tests.groups import QueueGroup, Queues
from tests.update.async_training.serving import Remote, Served

pytestmark = pytest.mark.usefixtures("packed")


def conversation(worker: Port, served: Served) -> list[object]:
    into = torch.empty(2)
    answers: list[object] = [(worker.pull(0, [into]), into.tolist())]
    answers.append(worker.push(0, served.gradient(4.0, count=2.0)))
    answers.append((worker.pull(1, [into]), into.tolist()))
    answers.append([(entry.step, entry.pulled, entry.pushed) for entry in worker.log(1)])
    worker.leave()
    worker.leave()  # a second time changes nothing
    return answers


def test_both_ways_have_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    local, remote = Served(1, staleness=float("inf")), Remote(monkeypatch, staleness=float("inf"))
    answers = conversation(LocalPort(local.server, Ledger()), local)
    assert answers == conversation(remote.port, remote)
    assert answers[2:] == [(1, [-2.0, -2.0]), [(0, 0, 1)]]
    assert local.server._clocks.all_gone


def test_the_local_worker_takes_over_what_connections_have_counted() -> None:
    served, ledger = Served(1, staleness=1), Ledger()
    served.server.traffic.begin("data", "send", Traffic(8, 8, 0), 0.0)
    before = len(ledger.totals)
    LocalPort(served.server, ledger).pull(0, [torch.empty(2)])
    assert (before, len(ledger.totals)) == (0, 1)
    assert not served.server.traffic.totals


def test_a_local_worker_that_waits_says_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is silent for long is taken for dead, unless it is inside an operation."""
    operations: list[str] = []
    monkeypatch.setattr(port, "enter_operation", operations.append)
    monkeypatch.setattr(port, "leave_operation", lambda: operations.append("left"))
    served = Served(1, staleness=1)
    worker = LocalPort(served.server, Ledger())
    worker.pull(0, [torch.empty(2)])
    worker.push(0, served.gradient(1.0))
    served.server.fail(ValueError("on purpose"))
    with pytest.raises(ServerFailed):
        worker.synchronize([torch.empty(2)])
    assert operations == ["pull data", "left", "push data", "left", "synchronize data", "left"]


def test_a_goodbye_is_sent_once_and_never_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(monkeypatch, staleness=1)
    remote.port.leave()
    remote.connection.thread.join(30.0)
    remote.port.leave()
    failed = Remote(monkeypatch, staleness=1)
    failed.server.fail(ValueError("on purpose"))
    with pytest.raises(ServerFailed):
        failed.port.pull(0, [torch.empty(2)])
    failed.connection.thread.join(30.0)
    failed.port.leave()
    for served in (remote, failed):
        served.queues.lose(1, 0)  # marks the end of what was sent
        with pytest.raises(Exception, match="rank 1 is lost"):
            recv_message(QueueGroup(served.queues, 0, 2, Ledger()), 1)


def test_a_goodbye_to_a_server_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(monkeypatch, staleness=1)

    def fail(*_: object) -> None:
        raise RuntimeError("the process group has ended")

    monkeypatch.setattr(port, "send_message", fail)
    remote.port.leave()
    remote.queues.lose(1, 0)
    remote.connection.thread.join(30.0)


Warm = Callable[[int], Ranks]


def pair() -> tuple[QueueGroup, QueueGroup]:
    queues = Queues()
    return QueueGroup(queues, 0, 2, Ledger()), QueueGroup(queues, 1, 2, Ledger())


def test_a_log_survives_the_journey() -> None:
    log = [Push(0, 0, 0, 1), Push(3, 7, 5, 9)]
    assert [Push(*row) for row in pack_log(log).tolist()] == log
    assert pack_log([]).shape == (0, 4)


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
