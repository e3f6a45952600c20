"""A worker's way to the server: the same answers, in one process or by messages."""

import pytest
import torch

from echelon.collectives import Ledger, Traffic
from echelon.update.async_training import port
from echelon.update.async_training.messages import recv_message
from echelon.update.async_training.port import LocalPort, Port
from echelon.update.async_training.server import ServerFailed
from tests.groups import QueueGroup
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
    remote.connection.join(30.0)
    remote.port.leave()
    failed = Remote(monkeypatch, staleness=1)
    failed.server.fail(ValueError("on purpose"))
    with pytest.raises(ServerFailed):
        failed.port.pull(0, [torch.empty(2)])
    failed.connection.join(30.0)
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
    remote.connection.join(30.0)
