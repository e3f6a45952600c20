"""A peer at the other end of a socket, and the words that it says."""

import contextlib
import select
import socket

from echelon.collectives.shared.slots import Word
from echelon.launching import PeerLost


class Speaker:
    """A peer, and how often it has said each word; `gone` are the peers that were lost, in this order."""

    def __init__(self, rank: int, connection: socket.socket, gone: list[int]) -> None:
        self.rank, self._connection, self._gone = rank, connection, gone
        self._told = [0] * len(Word)
        self._hang_up = select.poll()
        self._hang_up.register(connection, select.POLLRDHUP)

    @property
    def descriptor(self) -> int:
        return self._connection.fileno()

    def tell(self, word: Word, times: int) -> None:
        # Few words are ever unread, since rings are short: this never blocks. One that is gone is found
        # out by `listen`, after all that it had to say.
        with contextlib.suppress(OSError):
            self._connection.send(_SAID[word] * times, socket.MSG_NOSIGNAL)

    def has_told(self, word: Word) -> int:
        return self._told[word]

    def check(self) -> None:
        if self.rank in self._gone:
            first, *others = self._gone
            raise PeerLost(f"rank {first} is gone" + "".join(f", then rank {other}" for other in others))

    def has_hung_up(self) -> bool:
        """Whether it is gone, though perhaps not all that it had said was listened to."""
        return bool(self._hang_up.poll(0))

    def listen(self) -> bool:
        """Take in what it said; False when it is gone."""
        try:
            said = self._connection.recv(4096)
        except ConnectionError:
            said = b""
        for word in said:
            self._told[word] += 1
        if not said:
            self._gone.append(self.rank)
        return bool(said)

    def hang_up(self) -> None:
        """Let the peer know, from any thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


_SAID = [bytes([word]) for word in Word]
