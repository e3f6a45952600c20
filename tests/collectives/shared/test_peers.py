"""Two ranks connect, and strangers do not."""

import contextlib
import os
import socket
from collections.abc import Iterator
from mmap import mmap
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.collectives.shared import peers as peers_module
from echelon.collectives.shared.peers import Host, PeerSocket
from echelon.collectives.shared.slots import Notice
from echelon.launching import PeerLost, Ranks
from tests.collectives.shared.real_ranks import new_group


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Three ranks in one process."""
    with contextlib.ExitStack() as resources:
        yield [Host(rank, 3, resources) for rank in range(3)]


def connect(hosts: list[Host]) -> list[dict[int, peers_module.ConnectedPeer]]:
    """The peers of every rank."""
    invitations = [host.invitation for host in hosts]
    callers = [host.call(invitations[: host.rank]) for host in hosts]
    peers: list[list[peers_module.ConnectedPeer]] = [[] for _ in hosts]
    for host, connected in zip(hosts, peers, strict=True):
        host.answer_all(connected)
    for host, connected in zip(hosts, peers, strict=True):
        connected += [host.receive_region(caller, rank) for rank, caller in enumerate(callers[host.rank])]
    return [{peer.rank: peer for peer in connected} for connected in peers]


def test_every_pair_gets_a_socket_and_the_others_region(hosts: list[Host]) -> None:
    regions: list[mmap] = [host.map_region() for host in hosts]
    for rank, region in enumerate(regions):
        region[:4] = bytes([rank] * 4)
    peers = connect(hosts)
    for rank, connected in enumerate(peers):
        assert sorted(connected) == [other for other in range(3) if other != rank]
        for other, peer in connected.items():
            assert peer.process == os.getpid()
            assert peer.region[:4] == bytes([other] * 4), "what the other rank wrote into its region"
            peer.socket.send(bytes([rank]))
    for connected in peers:
        for other, peer in connected.items():
            assert peer.socket.recv(1) == bytes([other])
            peer.socket.close()


def test_a_rank_out_of_reach_is_reported_and_no_socket_stays_open(hosts: list[Host]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    unreachable = hosts[1].invitation._replace(name="echelon-nobody")
    assert hosts[2].call([hosts[0].invitation, unreachable]) == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("rank", [0, 1, 3, -1])
def test_a_caller_needs_the_secret_and_a_missing_rank(hosts: list[Host], rank: int) -> None:
    """Rank 0 expects ranks 1 and 2; a caller with a wrong secret, or another rank, gets no region."""
    secret = bytes.fromhex(hosts[0].invitation.secret)
    hello = peers_module._HELLO.pack(rank, secret if rank != 1 else bytes(len(secret)))
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(f"\0{hosts[0].invitation.name}")
    stranger.send(hello)
    peers: list[peers_module.ConnectedPeer] = []
    callers = [host.call([hosts[0].invitation]) for host in hosts[1:]]
    hosts[0].answer_all(peers)
    assert [peer.rank for peer in peers] == [1, 2]
    assert stranger.recv(1) == b"", "turned away"
    for connection in [stranger, *(peer.socket for peer in peers), *(caller for (caller,) in callers)]:
        connection.close()


def meets_strangers() -> str:
    """Some call before the ranks do: one silent, one with a wrong secret, one that is no rank."""
    prepare, strangers = peers_module.Host.__init__, []

    def prepare_and_call(self: peers_module.Host, *args: Any) -> None:
        prepare(self, *args)
        for hello in (b"", peers_module._HELLO.pack(2, b"guess"), peers_module._HELLO.pack(-7, b"")):
            strangers.append(socket.socket(socket.AF_UNIX))
            strangers[-1].connect(self._listener.getsockname())
            strangers[-1].send(hello)

    if dist.get_rank() == 0:
        peers_module.Host.__init__ = prepare_and_call  # type: ignore[method-assign]
        listen = socket.socket.listen
        socket.socket.listen = lambda self, _: listen(self, 10)  # type: ignore[method-assign,misc]
    group = new_group()
    tensor = torch.ones(5)
    group.all_reduce(tensor)
    return f"{tensor[0].item():.0f} in {group.size}"


def test_strangers_are_turned_away() -> None:
    with Ranks(3, deadline=30.0) as ranks:
        assert ranks.run(meets_strangers) == ["3 in 3"] * 3


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
