"""Notices over a socket: they are counted, and a peer is lost only after its last one."""

import socket
from collections.abc import Iterator

import pytest

from echelon.collectives.shared.peer_socket import PeerSocket
from echelon.collectives.shared.slots import Notice
from echelon.launching import PeerLost


@pytest.fixture
def ends() -> Iterator[tuple[PeerSocket, PeerSocket, list[int]]]:
    """This rank's end of a socket to rank 3, the other end, and the ranks lost so far."""
    first, second = socket.socketpair()
    lost: list[int] = []
    yield PeerSocket(3, first, lost), PeerSocket(0, second, []), lost
    first.close()
    second.close()


def test_notices_are_counted_by_kind(ends: tuple[PeerSocket, PeerSocket, list[int]]) -> None:
    here, other_end, _ = ends
    other_end.notify(Notice.WROTE, 1)
    other_end.notify(Notice.LANE_READ, 3)
    other_end.notify(Notice.WROTE, 2)
    assert here.num_received(Notice.WROTE) == 0, "counted when they are received"
    assert here.receive()
    assert [here.num_received(notice) for notice in Notice] == [3, 0, 0, 3]


def test_a_peer_is_lost_after_its_last_notice(ends: tuple[PeerSocket, PeerSocket, list[int]]) -> None:
    here, other_end, lost = ends
    assert not here.has_disconnected()
    other_end.notify(Notice.READ, 1)
    other_end.disconnect()
    assert here.has_disconnected(), "known at once"
    assert here.receive()
    here.raise_if_lost()
    assert not here.receive()
    assert lost == [3]
    with pytest.raises(PeerLost, match=r"rank 3 is gone$"):
        here.raise_if_lost()


def test_the_first_loss_is_reported_first(ends: tuple[PeerSocket, PeerSocket, list[int]]) -> None:
    here, other_end, lost = ends
    lost.append(1)
    here.raise_if_lost()  # not this peer
    other_end.disconnect()
    here.receive()
    with pytest.raises(PeerLost, match="rank 1 is gone, then rank 3"):
        here.raise_if_lost()


def test_notices_to_a_lost_peer_are_dropped(ends: tuple[PeerSocket, PeerSocket, list[int]]) -> None:
    here, other_end, _ = ends
    other_end.close()
    for _ in range(3):
        here.notify(Notice.WROTE, 1)
