"""The link: everything that connects this rank with its peers through shared memory.

Three kinds of queues keep order independently, so that a receive whose message was not sent yet holds up no
collective and no other pair:

    collectives     one queue: in the order of their calls, the same on every rank
    sends           one queue per target
    receives        one queue per source

[Note: rendezvous] All ranks of a group are linked or none. Everything that can fail does so before a vote, so
that a failure is a no for all ranks and not an error of one. Each exchange over the process group costs many
milliseconds with many ranks, so there are only three:

    cards       each rank's invitation, and the address of a secret in its memory
    vote        has every rank called the lower ranks? Then each caller waits in a listener's queue
    vote        is every rank linked? And can every rank read the others' secrets?
"""

import contextlib
import os
import secrets
import socket
import sys
import weakref
from collections.abc import Sequence
from mmap import mmap
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from echelon.collectives.shared.operation_queue import Operation, OperationQueue, Steps, raise_from
from echelon.collectives.shared.peers import SECRET_BYTES, ConnectedPeer, Host, Invitation, PeerSocket
from echelon.collectives.shared.progress_loop import ProgressLoop
from echelon.collectives.shared.slots import (
    COLLECTIVE,
    Notice,
    RingReader,
    RingWriter,
    collective_ring,
    lane,
    let_siblings_read,
    read_memory,
)
from echelon.errors import raise_errors
from echelon.launching import PeerLost


class Link:
    """This rank's ends of all rings between the ranks of a group, and the unfinished operations.

    `timeout` is how many seconds a caller waits for an operation. After an error the ranks are out of step,
    and the next operation would take the data of another one. So the first error ends the link, on this rank
    and thereby on its peers. Only a message to or from a lost peer ends just its queue.
    """

    def __init__(self, rank: int, region: mmap, peers: Sequence[ConnectedPeer], timeout: float) -> None:
        self._timeout = timeout
        self.rank, self.size = rank, len(peers) + 1
        self.can_read = False  # whether all ranks can read each other's memory
        lost: list[int] = []
        self._sockets = {peer.rank: PeerSocket(peer.rank, peer.socket, lost) for peer in peers}
        self._processes = {peer.rank: peer.process for peer in peers}
        self._open_rings(region, peers)
        first, second = torch.empty(2, COLLECTIVE.slot_bytes, dtype=torch.uint8, device="cpu")
        self.scratch = (first, second)
        self.collectives = OperationQueue()
        self.sends = {peer: OperationQueue(starts_at_call=True) for peer in self._sockets}
        self.receives = {peer: OperationQueue(is_lazy=True) for peer in self._sockets}
        queues = [self.collectives, *self.sends.values(), *self.receives.values()]
        self._progress_loop = ProgressLoop(queues, self.collectives, list(self._sockets.values()))
        self.finalizer: weakref.finalize[..., Any] | None = None  # closes this link with its process group
        _links.add(self)

    def submit(self, queue: OperationQueue, steps: Steps, where: str) -> Operation:
        """Begin an operation after the others of its queue; raise if an error ended the queue."""
        if self._progress_loop.is_inherited:
            steps.close()
            raise RuntimeError(
                f"{where}: a forked child cannot use the group of its parent, whose thread and sockets it "
                "does not have; use the group in the process that made it"
            )
        operation = Operation(steps, where, self._timeout, self._progress_loop)
        if failure := self._progress_loop.submit(queue, operation):
            steps.close()
            raise_from(failure, where)
        return operation

    def read(self, peer: int, address: int, destination: int, length: int) -> None:
        """Copy from `address` of `peer`, which keeps that memory until this rank releases its slot."""
        unreadable: OSError | None = None
        try:
            read_memory(self._processes[peer], address, destination, length)
        except OSError as error:
            unreadable = error
        if isinstance(unreadable, ProcessLookupError) or self._sockets[peer].has_disconnected():
            raise PeerLost(f"rank {peer} is gone, and its memory with it") from unreadable
        if unreadable is not None:
            raise RuntimeError(
                f"the tensor of rank {peer} was freed or unreadable while in use: {unreadable}"
            ) from unreadable

    def close(self) -> None:
        """From any thread, any number of times: unfinished operations fail."""
        if self.finalizer is not None:
            self.finalizer.detach()
        self._progress_loop.close()

    def _open_rings(self, region: mmap, peers: Sequence[ConnectedPeer]) -> None:
        collective = {"wrote": Notice.WROTE, "read": Notice.READ}
        pairwise = {"wrote": Notice.LANE_WROTE, "read": Notice.LANE_READ}
        sockets = self._sockets
        self.writer = RingWriter(collective_ring(region), list(sockets.values()), **collective)
        self.readers: dict[int, RingReader] = {}
        self.lane_writers: dict[int, RingWriter] = {}
        self.lane_readers: dict[int, RingReader] = {}
        for peer in peers:
            rank = peer.rank
            self.readers[rank] = RingReader(collective_ring(peer.region), sockets[rank], **collective)
            self.lane_writers[rank] = RingWriter(lane(region, rank), [sockets[rank]], **pairwise)
            self.lane_readers[rank] = RingReader(lane(peer.region, self.rank), sockets[rank], **pairwise)


_links: "weakref.WeakSet[Link]" = weakref.WeakSet()


def _close_all_sockets() -> None:
    """In a forked child: without this, its sockets would let peers take this rank for alive."""
    for peer in (peer for link in _links for peer in link._sockets.values()):
        peer.close()


os.register_at_fork(after_in_child=_close_all_sockets)


SWITCH = "ECHELON_TRANSPORT"  # "gloo" in any rank's environment switches shared memory off
_SWITCHES = ("auto", "shared", "gloo")

_CARD_BYTES = 256  # all ranks' cards have one length, so that one exchange is enough
_NO = "no"
_UNKNOWN = "unknown-switch"


def open_link(group: dist.ProcessGroup) -> Link | None:
    """Link all ranks of `group`, or none of them: the answer is the same on every rank."""
    with torch.device("cpu"), torch.inference_mode(False), contextlib.ExitStack() as resources:
        secret = torch.frombuffer(bytearray(secrets.token_bytes(SECRET_BYTES)), dtype=torch.uint8)
        host, own_card = _prepare(group, secret, resources)
        cards = [card.split() for card in _exchange(own_card, group)]
        _check_switches(cards)
        if host is None or [_NO] in cards or len({name for name, *_ in cards}) > 1:  # not on one host
            return None
        invitations = [_Card(*card) for card in cards]
        callers = host.call([Invitation(*card[:3]) for card in invitations[: host.rank]])
        (all_called,) = _vote(group, len(callers) == host.rank)
        if not all_called:
            _close_all(callers)
            return None
        peers = _connect(host, callers)
        link = _link_or_none(host, peers, group)
        can_read = all(_can_read(peer.process, invitations[peer.rank]) for peer in peers)
        all_linked, all_can_read = _vote(group, link is not None, can_read)
        if link is None or not all_linked:
            if link is not None:
                link.close()
            _close_all([*callers, *(peer.socket for peer in peers)])
            return None
        link.can_read = all_can_read
        return link


class _Card(NamedTuple):
    """An invitation, and where its rank keeps a secret that others try to read; all as text."""

    host: str
    name: str
    secret: str
    readable_secret: str
    address: str


def _prepare(
    group: dist.ProcessGroup, secret: torch.Tensor, resources: contextlib.ExitStack
) -> tuple[Host | None, str]:
    """Return this rank's end of the handshakes, and its card; or a card that says why there is none."""
    switch = os.environ.get(SWITCH) or "auto"
    if switch not in _SWITCHES:
        return None, f"{_UNKNOWN} {switch}"[: _CARD_BYTES // 4]  # a character has at most four bytes
    if sys.platform != "linux" or switch == "gloo":
        return None, _NO
    let_siblings_read()
    try:
        host = Host(group.rank(), group.size(), resources)
    except OSError:
        return None, _NO
    card = _Card(*host.invitation, secret.numpy().tobytes().hex(), str(secret.data_ptr()))
    return host, " ".join(card)


def _exchange(card: str, group: dist.ProcessGroup) -> list[str]:
    padded = bytearray(card.encode().ljust(_CARD_BYTES, b"\0"))
    cards = [torch.empty(_CARD_BYTES, dtype=torch.uint8) for _ in range(group.size())]
    dist.all_gather(cards, torch.frombuffer(padded, dtype=torch.uint8), group=group)
    return [card.numpy().tobytes().rstrip(b"\0").decode() for card in cards]


def _vote(group: dist.ProcessGroup, *answers: bool) -> list[bool]:
    """Return, for each answer, whether all ranks say yes."""
    votes = torch.tensor(answers, dtype=torch.uint8)
    dist.all_reduce(votes, dist.ReduceOp.MIN, group=group)
    return [bool(vote) for vote in votes]


def _check_switches(cards: list[list[str]]) -> None:
    """Raise on all ranks if one has a value that does not exist."""
    errors = [
        f"rank {rank}: {SWITCH}={' '.join(value)} must be one of {', '.join(_SWITCHES)}"
        for rank, (status, *value) in enumerate(cards)
        if status == _UNKNOWN
    ]
    raise_errors("the environment", errors)


def _connect(host: Host, callers: list[socket.socket]) -> list[ConnectedPeer]:
    """Return all peers, in rank order; fewer where one does not answer."""
    peers: list[ConnectedPeer] = []
    with contextlib.suppress(OSError, ValueError):
        host.answer_all(peers)
        peers.extend(host.receive_region(caller, rank) for rank, caller in enumerate(callers))
    return sorted(peers, key=lambda peer: peer.rank)


def _link_or_none(host: Host, peers: list[ConnectedPeer], group: dist.ProcessGroup) -> Link | None:
    """Return None if a peer is missing, or the system has no memory, descriptor or thread left."""
    if len(peers) < host.size - 1:
        return None
    backend = group._get_backend(torch.device("cpu"))
    try:
        return Link(host.rank, host.map_region(), peers, backend.options._timeout.total_seconds())
    except (OSError, RuntimeError):
        return None


def _can_read(process: int, card: _Card) -> bool:
    """Return whether this rank can read the secret of another one in that rank's memory."""
    buffer = torch.zeros(SECRET_BYTES, dtype=torch.uint8)
    with contextlib.suppress(OSError, AttributeError):  # some C libraries do not have the call
        read_memory(process, int(card.address), buffer.data_ptr(), SECRET_BYTES)
    return buffer.numpy().tobytes().hex() == card.readable_secret


def _close_all(sockets: list[socket.socket]) -> None:
    for connection in sockets:
        connection.close()
