"""The rendezvous: the ranks of a group find out whether they can share memory, and are linked if so.

All ranks are linked or none. Everything that can fail does so before a vote, so that a failure is a no for
all ranks and not an error of one. Each exchange over the process group costs many milliseconds with many
ranks, so there are only three:

    cards       each rank's invitation, and the address of a secret in its memory
    vote        has every rank called the lower ranks? Then each caller waits in a listener's queue
    vote        is every rank linked? And can every rank read the others' secrets?
"""

import contextlib
import os
import secrets
import socket
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist

from echelon.collectives.shared.handshake import SECRET_BYTES, ConnectedPeer, Host, Invitation
from echelon.collectives.shared.link import Link
from echelon.collectives.shared.process_memory import let_siblings_read, read_memory
from echelon.errors import raise_errors

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
        if host is None or not _on_one_host(cards):
            return None
        invitations = [_Card(*card) for card in cards]
        callers = host.call([card.invitation() for card in invitations[: host.rank]])
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

    def invitation(self) -> Invitation:
        return Invitation(self.host, self.name, self.secret)


def _prepare(
    group: dist.ProcessGroup, secret: torch.Tensor, resources: contextlib.ExitStack
) -> tuple[Host | None, str]:
    """This rank's end of the handshakes, and its card; or a card that says why there is none."""
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
    """The cards of all ranks."""
    padded = bytearray(card.encode().ljust(_CARD_BYTES, b"\0"))
    cards = [torch.empty(_CARD_BYTES, dtype=torch.uint8) for _ in range(group.size())]
    dist.all_gather(cards, torch.frombuffer(padded, dtype=torch.uint8), group=group)
    return [card.numpy().tobytes().rstrip(b"\0").decode() for card in cards]


def _vote(group: dist.ProcessGroup, *answers: bool) -> list[bool]:
    """For each answer, whether all ranks say yes."""
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


def _on_one_host(cards: list[list[str]]) -> bool:
    return [_NO] not in cards and len({host for host, *_ in cards}) == 1


def _connect(host: Host, callers: list[socket.socket]) -> list[ConnectedPeer]:
    """All peers, in rank order; fewer where one does not answer."""
    peers: list[ConnectedPeer] = []
    with contextlib.suppress(OSError, ValueError):
        host.answer_all(peers)
        peers.extend(host.receive_region(caller, rank) for rank, caller in enumerate(callers))
    return sorted(peers, key=lambda peer: peer.rank)


def _link_or_none(host: Host, peers: list[ConnectedPeer], group: dist.ProcessGroup) -> Link | None:
    """None where a peer is missing, or the system has no memory, descriptor or thread left."""
    if len(peers) < host.size - 1:
        return None
    backend = group._get_backend(torch.device("cpu"))
    try:
        return Link(host.rank, host.map_region(), peers, backend.options._timeout.total_seconds())
    except (OSError, RuntimeError):
        return None


def _can_read(process: int, card: _Card) -> bool:
    """Whether this rank can read the secret of another one in that rank's memory."""
    buffer = torch.zeros(SECRET_BYTES, dtype=torch.uint8)
    with contextlib.suppress(OSError, AttributeError):  # some C libraries do not have the call
        read_memory(process, int(card.address), buffer.data_ptr(), SECRET_BYTES)
    return buffer.numpy().tobytes().hex() == card.readable_secret


def _close_all(sockets: list[socket.socket]) -> None:
    for connection in sockets:
        connection.close()
