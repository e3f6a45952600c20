"""The link: everything that connects this rank with its peers through shared memory.

Three kinds of queues keep order independently, so that a receive whose message was not sent yet holds up no
collective and no other pair:

    collectives     one queue: in the order of their calls, the same on every rank
    sends           one queue per target
    receives        one queue per source
"""

import os
import weakref
from collections.abc import Sequence
from mmap import mmap
from typing import Any

import torch

from echelon.collectives.shared.handshake import ConnectedPeer
from echelon.collectives.shared.operation_queue import Operation, OperationQueue, Steps, raise_from
from echelon.collectives.shared.peer_socket import PeerSocket
from echelon.collectives.shared.process_memory import read_memory
from echelon.collectives.shared.progress_loop import ProgressLoop
from echelon.collectives.shared.slots import COLLECTIVE, Notice, RingReader, RingWriter, collective_ring, lane
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

    def close_sockets(self) -> None:
        """In a forked child: without this, its sockets would make this rank look alive to the peers."""
        for peer in self._sockets.values():
            peer.close()

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
    for link in _links:
        link.close_sockets()


os.register_at_fork(after_in_child=_close_all_sockets)
