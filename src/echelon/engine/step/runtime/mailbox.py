"""The mailbox of a rank: what it sends to the other ranks of its pipeline, and what it receives from them.

Sends return at once. Receives are posted ahead, in the order in which they will be needed, as soon as the
form of what comes is known; the instruction itself only waits.

A pipeline that never drains ends a step with messages on their way, whose instructions stand in the next
step. Their receives begin when the step ends. Then every send of a step has its receive, so between steps
each device comes to rest by itself: a user may synchronise it, meet the other ranks, or leave.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import final

from echelon.collectives import about_content
from echelon.engine.step.runtime.flight import Flight, Microbatch, Value
from echelon.engine.step.runtime.message import Gradients, Leaf
from echelon.engine.step.runtime.script import Script, Slot, microbatch_of, peer_of, slot_of
from echelon.engine.step.runtime.wire import Posted, Wire
from echelon.program import Instruction, Op

# Receives from one rank that are posted before they are needed. Not more: behind a message that is not as
# remembered come its description and the true one, which a second receive would take for the next.
_AHEAD = 1


@final
class Mailbox:
    """Sends and receives for the instructions of one rank.

    `flights` are those of the interpreter: the form of a gradient is that of its microbatch's output.
    """

    def __init__(self, wire: Wire, flights: Mapping[Slot, Flight], *, with_tally: bool) -> None:
        """`with_tally`: a tally of losses comes with each gradient."""
        self._wire, self._flights, self._with_tally = wire, flights, with_tally
        self._posted: dict[int, deque[Posted]] = {}  # by peer; from one step to the next, if it never drains

    def start_step(self, script: Script, feed: Mapping[int, Microbatch]) -> None:
        self._script, self._feed = script, feed
        self._upcoming: dict[int, deque[Instruction]] = {}
        for peer, receives in script.receives.items():
            posted = self._posted.setdefault(peer, deque())
            self._upcoming[peer] = deque(receives[len(posted) :])  # the step before has posted the first
        self._num_received = dict.fromkeys(script.receives, 0)
        self._wire.start_step()
        self.post_ahead()

    def finish_step(self) -> None:
        for peer, receives in self._script.in_flight.items():
            for receive in receives:
                posted = self._post(receive)
                assert posted is not None, f"{receive} before its form is known"
                with about_content(content_of(receive)):
                    posted.begin()
                self._posted.setdefault(peer, deque()).append(posted)
        self._wire.finish_step(emptied=self._script.empties)
        self._feed = {}

    def forget(self) -> None:
        """Let go of the receives that are posted: a step has failed."""
        self._posted.clear()

    def send_activation(self, instruction: Instruction, value: Value) -> None:
        key = (instruction.stage, self._input_form(instruction))
        with about_content(content_of(instruction)):
            self._wire.send(value.spec, value.tensors, peer_of(instruction), key)

    def receive_activation(self, instruction: Instruction) -> Value:
        peer, key = peer_of(instruction), self._activation_key(instruction)
        posted = self._take_posted(peer)
        with about_content(content_of(instruction)):
            value = Value(*self._wire.receive(posted, peer, key))
        self._acknowledge(peer)
        return value

    def send_gradients(self, instruction: Instruction, leaves: Sequence[Leaf], gradients: Gradients) -> None:
        with about_content(content_of(instruction)):
            self._wire.send_gradients(leaves, gradients, peer_of(instruction))

    def receive_gradients(self, instruction: Instruction) -> Gradients:
        posted = self._take_posted(peer_of(instruction))
        assert posted is not None, f"{instruction} before its forward"
        with about_content(content_of(instruction)):
            gradients = self._wire.receive_gradients(posted)
        self._acknowledge(peer_of(instruction))
        return gradients

    def post_ahead(self) -> None:
        """Post the next receives from every rank, as far as the form of what comes is known."""
        for peer, upcoming in self._upcoming.items():
            while upcoming and len(self._posted[peer]) < _AHEAD:
                posted = self._post(upcoming[0])
                if posted is None:  # messages of a peer match receives in order: none may overtake it
                    break
                upcoming.popleft()
                self._posted[peer].append(posted)

    def _take_posted(self, peer: int) -> Posted | None:
        """The receive that is posted for the next message of `peer`; None if its form is not known."""
        posted = self._posted[peer]
        return posted.popleft() if posted else self._post(self._upcoming[peer].popleft())

    def _post(self, instruction: Instruction) -> Posted | None:
        with about_content(content_of(instruction)):
            return self._post_receive(instruction)

    def _post_receive(self, instruction: Instruction) -> Posted | None:
        if instruction.op is Op.RECV_ACTIVATION:
            return self._wire.post(peer_of(instruction), self._activation_key(instruction))
        flight = self._flights.get(slot_of(instruction))
        if flight is None:  # the forward has not run, whose output has the gradient's form
            return None
        return self._wire.post_gradients(flight.output_leaves, peer_of(instruction), tally=self._with_tally)

    def _acknowledge(self, peer: int) -> None:
        """Free the messages that `peer` must have received before it sent the one that has come."""
        self._wire.acknowledge(peer, self._script.acknowledged[peer][self._num_received[peer]])
        self._num_received[peer] += 1

    def _activation_key(self, instruction: Instruction) -> tuple[int, str]:
        """Return the key under which the form of a received activation is remembered."""
        return instruction.stage - 1, self._input_form(instruction)

    def _input_form(self, instruction: Instruction) -> str:
        return self._feed[microbatch_of(instruction)].form


@lru_cache(maxsize=4096)
def content_of(instruction: Instruction) -> str:
    """Name the content of a message, the same at both ends; debug=true compares it."""
    to_later = instruction.op in (Op.SEND_ACTIVATION, Op.RECV_ACTIVATION)
    sends = instruction.op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)
    receiver = instruction.stage if not sends else instruction.stage + (1 if to_later else -1)
    kind = "activation" if to_later else "gradient"
    return f"{kind} of microbatch {microbatch_of(instruction)} for stage {receiver}"
