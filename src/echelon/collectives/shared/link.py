"""The link: all that connects this rank with its peers through shared memory.

Three kinds of lines keep order, each by itself, so that a receive nobody has sent for yet holds up no
collective and no other pair:

    collectives     one line: in the order of their calls, the same on every rank
    sends           one line for each target
    receives        one line for each source
"""

import os
import weakref

import torch

from echelon.collectives.shared.drive import Drive
from echelon.collectives.shared.foreign import read_memory
from echelon.collectives.shared.lines import Line, Passage, Steps, raise_from
from echelon.collectives.shared.meeting import Meeting
from echelon.collectives.shared.slots import COLLECTIVE, Inbox, Outbox, Word, collective_ring, lane
from echelon.collectives.shared.speaker import Speaker
from echelon.launching import PeerLost


class Link:
    """This rank's ends of all rings between the ranks of a group, and the operations under way.

    `timeout` is how many seconds an operation may be waited for. After an error the ranks are out of step,
    and whatever came next would take what was meant for another operation. So the first error ends the link,
    on this rank and thereby on its peers. Only a message to or from a peer that is gone ends just its line.
    """

    def __init__(self, rank: int, meeting: Meeting, timeout: float) -> None:
        self._timeout = timeout
        self.rank, self.size = rank, len(meeting.peers) + 1
        gone: list[int] = []
        self._speakers = {met.rank: Speaker(met.rank, met.socket, gone) for met in meeting.peers}
        self._open_rings(meeting)
        first, second = torch.empty(2, COLLECTIVE.slot_bytes, dtype=torch.uint8, device="cpu")
        self.scratch = (first, second)
        self.can_read = meeting.can_read
        self._processes = {met.rank: met.process for met in meeting.peers}
        self.collectives = Line()
        self.sends = {peer: Line(at_once=True) for peer in self._speakers}
        self.receives = {peer: Line(at_leisure=True) for peer in self._speakers}
        lines = [self.collectives, *self.sends.values(), *self.receives.values()]
        self._drive = Drive(lines, self.collectives, list(self._speakers.values()))
        _links.add(self)

    def submit(self, line: Line, steps: Steps, where: str) -> Passage:
        """Begin an operation behind the others of its line; raise what ended the line or the link."""
        if self._drive.is_inherited:
            steps.close()
            raise RuntimeError(
                f"{where}: a forked child cannot use the group of its parent, whose thread and sockets it "
                "does not have; use the group in the process that made it"
            )
        passage = Passage(steps, where, self._timeout, self._drive)
        if failure := self._drive.submit(line, passage):
            steps.close()
            raise_from(failure, where)
        return passage

    def read(self, peer: int, address: int, into: int, length: int) -> None:
        """Copy what `peer` has at `address`, where it keeps it until it is told that it was read."""
        unreadable: OSError | None = None
        try:
            read_memory(self._processes[peer], address, into, length)
        except OSError as error:
            unreadable = error
        if isinstance(unreadable, ProcessLookupError) or self._speakers[peer].has_hung_up():
            raise PeerLost(f"rank {peer} is gone, and its memory with it") from unreadable
        if unreadable is not None:
            raise RuntimeError(
                f"the tensor of rank {peer} was freed or unreadable while in use: {unreadable}"
            ) from unreadable

    def close(self) -> None:
        """From any thread: what is still under way fails."""
        self._drive.close()

    def forget(self) -> None:
        """In a forked child: let go of sockets that would keep this rank alive in the eyes of its peers."""
        for speaker in self._speakers.values():
            speaker.close()

    def _open_rings(self, meeting: Meeting) -> None:
        together = {"wrote": Word.WROTE, "read": Word.READ}
        in_pairs = {"wrote": Word.LANE_WROTE, "read": Word.LANE_READ}
        speakers = self._speakers
        self.outbox = Outbox(collective_ring(meeting.region), list(speakers.values()), **together)
        self.inboxes: dict[int, Inbox] = {}
        self.lanes_out: dict[int, Outbox] = {}
        self.lanes_in: dict[int, Inbox] = {}
        for met in meeting.peers:
            peer, region = met.rank, met.region
            self.inboxes[peer] = Inbox(collective_ring(region), speakers[peer], **together)
            self.lanes_out[peer] = Outbox(lane(meeting.region, peer), [speakers[peer]], **in_pairs)
            self.lanes_in[peer] = Inbox(lane(region, self.rank), speakers[peer], **in_pairs)


_links: "weakref.WeakSet[Link]" = weakref.WeakSet()


def _forget_all() -> None:
    for link in _links:
        link.forget()


os.register_at_fork(after_in_child=_forget_all)
