"""The server's side of one remote worker: every request is answered, and every end is noticed."""

import pytest
import torch

from echelon.collectives import Ledger
from echelon.launching import PeerLost
from echelon.update.async_training.port import Kind, Message
from echelon.update.async_training.server import ServerFailed
from echelon.update.update import Push
from tests.update.async_training.serving import Remote

pytestmark = pytest.mark.usefixtures("packed")


def pulled(remote: Remote, step: int) -> tuple[int, list[float]]:
    into = torch.empty(2)
    return remote.port.pull(step, [into]), into.tolist()


def joined(remote: Remote) -> bool:
    remote.connection.thread.join(30.0)
    return not remote.connection.thread.is_alive()


def test_every_request_has_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(monkeypatch, staleness=float("inf"))
    assert pulled(remote, 0) == (0, [0.0, 0.0])
    assert remote.port.push(0, remote.gradient(6.0, count=2.0)) == (1, 0.0, 2.0, pytest.approx(18**0.5))
    remote.push(0, 0, 1.0)
    assert pulled(remote, 1) == (2, [-4.0, -4.0])
    assert remote.port.log(2) == [Push(1, 0, 0, 1), Push(0, 0, 0, 2)]
    assert remote.port.log(0) == []
    remote.port.leave()
    assert joined(remote)


def test_all_synchronize_together(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(monkeypatch, staleness=1)
    remote.push(0, 0, 3.0)
    first = remote.later(remote.synchronize, 0)
    into = torch.empty(2)
    assert (remote.port.synchronize([into]), into.tolist()) == first.result(5) == (1, [-3.0, -3.0])
    remote.port.leave()


def test_a_goodbye_lets_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(monkeypatch, staleness=0)
    waiting = remote.later(remote.push, 0, 0, 2.0)
    remote.port.leave()
    assert waiting.result(5).version == 1
    assert joined(remote)


def test_a_worker_that_is_lost_fails_the_server_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(monkeypatch, staleness=0)
    waiting = remote.later(remote.push, 0, 0, 2.0)
    remote.queues.lose(1, 0)
    with pytest.raises(PeerLost, match="worker 1 left the server without a goodbye: rank 1 is lost"):
        waiting.result(5)
    assert joined(remote)


def test_an_update_that_failed_is_reported_to_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(monkeypatch, staleness=1)
    remote.server.fail(ZeroDivisionError("on purpose"))
    with pytest.raises(ServerFailed, match="on replica 0: ZeroDivisionError: on purpose"):
        pulled(remote, 0)
    assert joined(remote), "a server that failed answers nothing more"


def test_a_rank_that_was_lost_is_reported_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(monkeypatch, staleness=1)
    remote.server.fail(PeerLost("worker 2 is lost"))
    with pytest.raises(PeerLost, match="worker 2 is lost"):
        pulled(remote, 0)


class Broken(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # noqa: ARG002
        raise ZeroDivisionError("failed on purpose")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_worker_whose_push_fails_learns_why(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(monkeypatch, staleness=1, make=lambda parameters: Broken(parameters, lr=1.0))
    with pytest.raises(ServerFailed, match="ZeroDivisionError: failed on purpose"):
        remote.port.push(0, remote.gradient(1.0))
    assert joined(remote)
    with pytest.raises(ServerFailed, match="failed on purpose"):
        remote.pull(0, 0)


def test_what_is_moved_is_counted_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(monkeypatch, staleness=float("inf"))
    pulled(remote, 0)
    remote.port.push(0, remote.gradient(1.0))
    remote.port.leave()
    assert joined(remote)
    ledger = Ledger()
    remote.server.drain(ledger)
    rows = {(row["operation"], row["subject"]): row for row in ledger.rows()}
    assert rows["send", "parameters"]["sent"] == 8
    assert rows["recv", "gradients"]["received"] == 8 + 1, "and a flag"
    own = {(row["operation"], row["subject"]): row for row in remote.ledger.rows()}
    assert own["recv", "parameters"]["received"] == 8
    assert own["send", "gradients"]["sent"] == 8 + 1
    remote.server.drain(ledger)
    assert {(row["operation"], row["subject"]): row for row in ledger.rows()} == rows, "drained once"


def test_a_request_that_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(monkeypatch, staleness=1)
    with pytest.raises(AssertionError):
        remote.connection._ask_server(Message(Kind.DONE))
    remote.port.leave()
