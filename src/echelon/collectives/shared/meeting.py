"""How the ranks of a group meet: are they all on this host, and then a socket and a region for each pair.

Nothing is left behind, however a rank ends: regions are anonymous memory, passed from rank to rank over the
sockets, and the sockets listen in Linux's abstract namespace, which has no files. That namespace belongs to
the network namespace: ranks in another one cannot be reached, and then the group stays with its backend.
"""

import contextlib
import os
import secrets
import socket
import struct
import sys
import time
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from echelon.collectives.shared.foreign import let_siblings_read, read_memory
from echelon.collectives.shared.slots import region_bytes
from echelon.errors import raise_errors
from echelon.launching.group import all_gather_bytes

SWITCH = "ECHELON_TRANSPORT"  # "gloo" in any rank's environment switches this transport off
_SWITCHES = ("auto", "shared", "gloo")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # another one on every host, and after every start
_NO = b"no"
_UNKNOWN = b"? "  # before the value of a switch that is not known
_SECRET_BYTES = 16
_HELLO = struct.Struct(f"i{_SECRET_BYTES}s")  # the caller's rank, and the secret of whom it calls
_PATIENCE_SECONDS = 5.0  # with a step of the meeting: ranks take milliseconds
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class _Credentials(NamedTuple):
    process: int
    user: int
    group: int


class Met(NamedTuple):
    """What two ranks share: the way to talk, and the other's region."""

    rank: int
    process: int
    socket: socket.socket
    region: mmap


class Meeting(NamedTuple):
    """This rank's region, the peers it met, and whether they all can read each other's memory."""

    region: mmap
    peers: list[Met]
    can_read: bool


def meet(group: dist.ProcessGroup) -> Meeting | None:
    """Connect all ranks of `group`, or none of them: every rank gets the same kind of answer.

    Whatever may fail does so before a vote: then the answer is no for all, not an error for one.
    """
    rank, size = group.rank(), group.size()
    with contextlib.ExitStack() as open_here:
        try:
            descriptor, listener, card = _prepare(size, open_here)
        except OSError:
            descriptor, listener, card = -1, None, _NO
        cards = all_gather_bytes(card, group)
        _check_switches(cards)
        if listener is None or not _one_host(cards):
            return None
        invitations = [_Invitation.read(card) for card in cards]
        below = _call(invitations[:rank], rank, descriptor)
        peers: list[Met] = []
        # Once all have called, the callers wait in the listener's queue, and their hellos with them.
        if agree(len(below) == rank, group):
            with contextlib.suppress(OSError, ValueError):
                _answer_all(peers, listener, descriptor, invitations[rank].secret, range(rank + 1, size))
                peers.extend(_greet(each, index, size) for index, each in enumerate(below))
        region = _mapped(descriptor, size) if len(peers) == size - 1 else None
        if not agree(region is not None, group) or region is None:
            for each in [*below, *(met.socket for met in peers)]:
                each.close()
            return None
        return Meeting(region, sorted(peers, key=_rank_of), _can_read(peers, group))


def agree(mine: bool, group: dist.ProcessGroup) -> bool:
    """Whether all ranks say yes."""
    return _NO not in all_gather_bytes(b"yes" if mine else _NO, group)


class _Invitation(NamedTuple):
    """Where a rank listens, on which host, and what a caller must know: only ranks are told."""

    host: str
    name: str
    secret: bytes

    def card(self) -> bytes:
        return f"{self.host} {self.name} {self.secret.hex()}".encode()

    @classmethod
    def read(cls, card: bytes) -> "_Invitation":
        host, name, secret = card.decode().split()
        return cls(host, name, bytes.fromhex(secret))


def _prepare(size: int, keep: contextlib.ExitStack) -> tuple[int, socket.socket | None, bytes]:
    """Memory without a name, a listener, and the card that invites to it; or why there is none."""
    switch = os.environ.get(SWITCH) or "auto"
    if switch not in _SWITCHES:
        return -1, None, _UNKNOWN + switch.encode()
    if sys.platform != "linux" or switch == "gloo":
        return -1, None, _NO
    descriptor = os.memfd_create("echelon")
    keep.callback(os.close, descriptor)  # the mapping stays
    os.ftruncate(descriptor, region_bytes(size))
    listener = keep.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    host = _BOOT_ID.read_text().strip()
    invitation = _Invitation(host, f"echelon-{secrets.token_hex(16)}", secrets.token_bytes(_SECRET_BYTES))
    listener.bind(f"\0{invitation.name}")
    listener.listen(size)
    return descriptor, listener, invitation.card()


def _check_switches(cards: list[bytes]) -> None:
    """Raise on all ranks if one has a value that nobody knows."""
    errors = [
        f"rank {rank}: {SWITCH}={card.removeprefix(_UNKNOWN).decode()} must be one of {', '.join(_SWITCHES)}"
        for rank, card in enumerate(cards)
        if card.startswith(_UNKNOWN)
    ]
    raise_errors("the environment", errors)


def _one_host(cards: list[bytes]) -> bool:
    return _NO not in cards and len({card.split()[0] for card in cards}) == 1


def _call(invitations: list[_Invitation], rank: int, descriptor: int) -> list[socket.socket]:
    """Call the listeners and hand each this rank's region; fewer than asked for where one is out of reach."""
    reached: list[socket.socket] = []
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with contextlib.suppress(OSError):
        for invitation in invitations:
            caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            reached.append(caller)
            caller.settimeout(_PATIENCE_SECONDS)
            _connect(caller, invitation.name, deadline)
            if not _is_ours(caller):
                raise PermissionError("the listener belongs to another user")
            hello = _HELLO.pack(rank, invitation.secret)
            socket.send_fds(caller, [hello], [descriptor], socket.MSG_NOSIGNAL)
        return reached
    for each in reached:
        each.close()
    return []


def _connect(caller: socket.socket, name: str, deadline: float) -> None:
    """Connect; while strangers fill the listener's queue, try again until the deadline."""
    while True:
        try:
            caller.connect(f"\0{name}")
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _answer_all(
    peers: list[Met], listener: socket.socket, descriptor: int, secret: bytes, expected: range
) -> None:
    """Append all of the `expected` ranks, which have called; whoever else has is turned away."""
    size, missing = expected.stop, set(expected)
    listener.settimeout(_PATIENCE_SECONDS)
    while missing:
        caller, _ = listener.accept()
        met = _answer(caller, descriptor, secret, missing, size)
        if met is None:
            caller.close()
        else:
            missing.remove(met.rank)
            peers.append(met)


def _answer(
    caller: socket.socket, descriptor: int, secret: bytes, missing: set[int], size: int
) -> Met | None:
    """The rank that calls, or None for a stranger. A rank's hello is here already: nobody is waited for."""
    if not _is_ours(caller):
        return None
    caller.setblocking(False)
    try:
        hello, descriptors, _, _ = socket.recv_fds(caller, _HELLO.size, 1)
    except OSError:
        return None
    rank, told = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (-1, b"")
    if rank not in missing or not secrets.compare_digest(told, secret):
        for each in descriptors:
            os.close(each)
        return None
    region = _map(descriptors, size)
    caller.settimeout(_PATIENCE_SECONDS)
    socket.send_fds(caller, [b"\0"], [descriptor], socket.MSG_NOSIGNAL)
    caller.settimeout(None)
    return Met(rank, _credentials(caller).process, caller, region)


def _greet(called: socket.socket, rank: int, size: int) -> Met:
    """What rank `rank`, which was called, hands over."""
    _, descriptors, _, _ = socket.recv_fds(called, 1, 1)
    called.settimeout(None)
    return Met(rank, _credentials(called).process, called, _map(descriptors, size))


def _rank_of(met: Met) -> int:
    return met.rank


def _can_read(peers: list[Met], group: dist.ProcessGroup) -> bool:
    """Whether every rank can read every other's memory: each tries to read a secret of each."""
    let_siblings_read()
    secret = torch.frombuffer(bytearray(secrets.token_bytes(_SECRET_BYTES)), dtype=torch.uint8)
    told = all_gather_bytes(secret.numpy().tobytes() + secret.data_ptr().to_bytes(8, "little"), group)
    readable = all(_reads(met.process, told[met.rank]) for met in peers)
    return agree(readable, group)


def _reads(process: int, told: bytes) -> bool:
    found = torch.zeros(_SECRET_BYTES, dtype=torch.uint8, device="cpu")
    with contextlib.suppress(OSError, AttributeError):  # not every C library has it
        read_memory(process, int.from_bytes(told[_SECRET_BYTES:], "little"), found.data_ptr(), _SECRET_BYTES)
    return found.numpy().tobytes() == told[:_SECRET_BYTES]


def _map(descriptors: list[int], size: int) -> mmap:
    (descriptor,) = descriptors
    try:
        return mmap(descriptor, region_bytes(size))
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, size: int) -> mmap | None:
    try:
        return mmap(descriptor, region_bytes(size))
    except OSError:
        return None


def _is_ours(caller: socket.socket) -> bool:
    return _credentials(caller).user == os.getuid()


def _credentials(caller: socket.socket) -> _Credentials:
    """Of the other end, as the kernel knows them."""
    packed = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _Credentials(*_CREDENTIALS.unpack(packed))
