"""Peers: the handshake of two ranks of one host, and the socket between them.

In the handshake each one gets the region of the other. Nothing is left behind, however a rank ends: regions
are anonymous memory, passed over the sockets. The sockets listen in Linux's abstract namespace, which has no
files. That namespace belongs to the network namespace, so ranks in another one cannot be reached.
"""

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

from echelon.collectives.shared.slots import Notice, region_bytes
from echelon.launching import PeerLost

SECRET_BYTES = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # differs between hosts, and after every boot
_HELLO = struct.Struct(f"i{SECRET_BYTES}s")  # the caller's rank, and the secret of the rank it calls
_TIMEOUT_SECONDS = 5.0  # of one step of the handshake; ranks take milliseconds
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class ConnectedPeer(NamedTuple):
    """A peer after the handshake: the socket to it, and its region."""

    rank: int
    process: int
    socket: socket.socket
    region: mmap


class Invitation(NamedTuple):
    """The name at which a rank listens, its host, and a caller's secret. Only ranks of the group get it."""

    host: str
    name: str
    secret: str

    @classmethod
    def new(cls) -> "Invitation":
        name = f"echelon-{secrets.token_hex(16)}"
        return cls(_BOOT_ID.read_text().strip(), name, secrets.token_hex(SECRET_BYTES))


class Host:
    """This rank's side of the handshakes: its region, and the listener that higher ranks call."""

    def __init__(self, rank: int, size: int, resources: contextlib.ExitStack) -> None:
        """`resources` closes the listener and the descriptor; the mapped regions stay."""
        self.rank, self.size = rank, size
        self.invitation = Invitation.new()
        self._descriptor = os.memfd_create("echelon")
        resources.callback(os.close, self._descriptor)
        os.ftruncate(self._descriptor, region_bytes(size))
        self._listener = resources.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._listener.bind(f"\0{self.invitation.name}")
        self._listener.listen(size)

    def map_region(self) -> mmap:
        return mmap(self._descriptor, region_bytes(self.size))

    def call(self, invitations: list[Invitation]) -> list[socket.socket]:
        """Call lower ranks and pass each this rank's region; empty if one cannot be reached."""
        callers: list[socket.socket] = []
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        with contextlib.suppress(OSError):
            for invitation in invitations:
                caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                callers.append(caller)
                caller.settimeout(_TIMEOUT_SECONDS)
                _connect(caller, invitation.name, deadline)
                if not _has_our_user(caller):
                    raise PermissionError("the listener belongs to another user")
                hello = _HELLO.pack(self.rank, bytes.fromhex(invitation.secret))
                socket.send_fds(caller, [hello], [self._descriptor], socket.MSG_NOSIGNAL)
            return callers
        for caller in callers:
            caller.close()
        return []

    def answer_all(self, peers: list[ConnectedPeer]) -> None:
        """Append all higher ranks, which have called, to `peers`; reject other callers."""
        missing = set(range(self.rank + 1, self.size))
        self._listener.settimeout(_TIMEOUT_SECONDS)
        while missing:
            caller, _ = self._listener.accept()
            peer = self._answer(caller, missing)
            if peer is None:
                caller.close()
            else:
                missing.remove(peer.rank)
                peers.append(peer)

    def receive_region(self, caller: socket.socket, rank: int) -> ConnectedPeer:
        """Return the answer of rank `rank`, which was called."""
        _, descriptors, _, _ = socket.recv_fds(caller, 1, 1)
        caller.settimeout(None)
        return ConnectedPeer(rank, _credentials(caller).process, caller, self._map(descriptors))

    def _answer(self, caller: socket.socket, missing: set[int]) -> ConnectedPeer | None:
        """Return the rank that calls, or None for a stranger. A rank's hello is here: this never waits."""
        if not _has_our_user(caller):
            return None
        caller.setblocking(False)
        try:
            hello, descriptors, _, _ = socket.recv_fds(caller, _HELLO.size, 1)
        except OSError:
            return None
        rank, secret = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (-1, b"")
        if rank not in missing or not secrets.compare_digest(secret, bytes.fromhex(self.invitation.secret)):
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        region = self._map(descriptors)
        caller.settimeout(_TIMEOUT_SECONDS)
        socket.send_fds(caller, [b"\0"], [self._descriptor], socket.MSG_NOSIGNAL)
        caller.settimeout(None)
        return ConnectedPeer(rank, _credentials(caller).process, caller, region)

    def _map(self, descriptors: list[int]) -> mmap:
        (descriptor,) = descriptors
        try:
            return mmap(descriptor, region_bytes(self.size))
        finally:
            os.close(descriptor)


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


class _Credentials(NamedTuple):
    process: int
    user: int
    group: int


def _has_our_user(caller: socket.socket) -> bool:
    return _credentials(caller).user == os.getuid()


def _credentials(caller: socket.socket) -> _Credentials:
    """Return the credentials of the other end, from the kernel."""
    packed = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _Credentials(*_CREDENTIALS.unpack(packed))


class PeerSocket:
    """Sends notices to a peer and counts those from it. `lost` lists the lost peers, the first one first."""

    def __init__(self, rank: int, connection: socket.socket, lost: list[int]) -> None:
        self.rank, self._connection, self._lost = rank, connection, lost
        self._num_received = [0] * len(Notice)
        self._disconnect_poll = select.poll()
        self._disconnect_poll.register(connection, select.POLLRDHUP)

    @property
    def descriptor(self) -> int:
        return self._connection.fileno()

    def notify(self, notice: Notice, times: int) -> None:
        # This never blocks: rings are short, so few notices are ever unread. An error is ignored here;
        # `receive` finds out that the peer is lost, after everything that it had sent.
        with contextlib.suppress(OSError):
            self._connection.send(_ENCODED[notice] * times, socket.MSG_NOSIGNAL)

    def num_received(self, notice: Notice) -> int:
        return self._num_received[notice]

    def raise_if_lost(self) -> None:
        if self.rank in self._lost:
            first, *others = self._lost
            raise PeerLost(f"rank {first} is gone" + "".join(f", then rank {other}" for other in others))

    def has_disconnected(self) -> bool:
        """Return whether the peer is gone, even if some of its notices were not received yet."""
        return bool(self._disconnect_poll.poll(0))

    def receive(self) -> bool:
        """Count the notices that have arrived; False when the peer is gone."""
        try:
            notices = self._connection.recv(4096)
        except ConnectionError:
            notices = b""
        for notice in notices:
            self._num_received[notice] += 1
        if not notices:
            self._lost.append(self.rank)
        return bool(notices)

    def disconnect(self) -> None:
        """Let the peer know that this rank is gone; from any thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


_ENCODED = [bytes([notice]) for notice in Notice]
