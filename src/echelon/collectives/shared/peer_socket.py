"""The socket to one peer, and the notices received from it."""

import contextlib
import select
import socket

from echelon.collectives.shared.slots import Notice
from echelon.launching import PeerLost


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
        """Whether the peer is gone, even if some of its notices were not received yet."""
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
