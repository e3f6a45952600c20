"""Messages between stages, sent and received without waiting.

A receiver that knows what will come takes memory for it and posts the receive long before. The form of a
gradient is that of its activation. The form of an activation follows from what its microbatch's inputs look
like, mostly: both sides remember it from earlier steps (and use from the next step on what they learn in
one, so that they always agree). Then one message is enough. Its code is 0 if all is as remembered; else it
is the length of the true description, which follows, and then the true message. What nobody remembers is
described first.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.collectives import Group, Handle
from echelon.runtime import message
from echelon.runtime.message import CODE_BYTES, NO_TALLY, Gradients, Tally
from echelon.runtime.structure import Leaf, Spec

Key = tuple[int, str]  # the stage that sends, and what its microbatch's inputs look like
Way = tuple[int, Key]  # and the rank at the other end


class Posted(NamedTuple):
    """A receive that waits for its message."""

    spec: Spec | None  # of an activation
    leaves: Sequence[Leaf]
    memory: Tensor
    handle: Handle


class Wire:
    """The ways from this rank to the others of a pipeline, and back."""

    def __init__(self, group: Group, back: Group, device: torch.device) -> None:
        """`group` takes messages to higher ranks and `back` those to lower ones: over NCCL what two ranks do
        on one communicator happens in one order, and each would wait for the other to receive first."""
        self._group, self._back, self._device = group, back, device
        self._known: dict[Way, Spec] = {}
        self._learned: dict[Way, Spec] = {}
        self._sent: list[tuple[Handle, Tensor]] = []  # in this step
        self._earlier: list[tuple[Handle, Tensor]] = []  # in the one before
        self._spare: Tensor | None = None  # memory of a message that is gone: new memory takes long to touch

    def start_step(self) -> None:
        """What was learned is known from here on: on all ranks alike."""
        self._known |= self._learned
        self._learned = {}

    def finish_step(self, *, emptied: bool) -> None:
        """Return when all that was sent is gone; unless the pipeline is `emptied`, what was sent before this
        step: the last messages of a step may be received in the next."""
        gone = [*self._earlier, *self._sent] if emptied else self._earlier
        for handle, _ in gone:
            handle.wait()
        self._earlier, self._sent = [] if emptied else self._sent, []

    # Activations.

    def send(self, spec: Spec, tensors: Sequence[Tensor], peer: int, key: Key) -> None:
        expected = self._known.get((peer, key))
        self._learned[peer, key] = spec
        if expected != spec:
            text = torch.frombuffer(bytearray(spec.text.encode()), dtype=torch.uint8).to(self._device)
            first = self._memory(CODE_BYTES if expected is None else message.size(expected.leaves))
            message.announce(first, len(text))
            self._send(first, peer)
            self._send(text, peer)
        self._send_message(spec.leaves, tensors, NO_TALLY, peer)

    def post(self, peer: int, key: Key) -> Posted | None:
        """Be ready for an activation, if its form is remembered."""
        spec = self._known.get((peer, key))
        return None if spec is None else self._post(spec, spec.leaves, peer)

    def receive(self, posted: Posted | None, peer: int, key: Key) -> tuple[Spec, list[Tensor]]:
        """An activation, when it is there; `posted`, if its form was remembered."""
        if posted is None:
            length = message.code(self._receive(CODE_BYTES, peer))
        else:
            posted.handle.wait()
            length = message.code(posted.memory)
        if posted is not None and length == 0:
            assert posted.spec is not None
            spec, memory = posted.spec, posted.memory
        else:
            spec = Spec(message.read(self._receive(length, peer), length).decode())
            memory = self._receive(message.size(spec.leaves), peer)
        self._learned[peer, key] = spec
        return spec, message.tensors_of(memory, spec.leaves)

    # Gradients.

    def send_gradients(self, leaves: Sequence[Leaf], gradients: Gradients, peer: int) -> None:
        self._send_message(leaves, *gradients, peer)

    def post_gradients(self, leaves: Sequence[Leaf], peer: int) -> Posted:
        return self._post(None, leaves, peer)

    def receive_gradients(self, posted: Posted) -> Gradients:
        posted.handle.wait()
        return message.gradients_of(posted.memory, posted.leaves)

    # Bytes.

    def _send_message(
        self, leaves: Sequence[Leaf], tensors: Sequence[Tensor | None], tally: Tally, peer: int
    ) -> None:
        self._let_go()
        memory = self._memory(message.size(leaves))
        message.write(memory, leaves, tensors, tally)
        self._send(memory, peer)

    def _memory(self, size: int) -> Tensor:
        spare, self._spare = self._spare, None
        if spare is not None and spare.numel() == size:
            return spare
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _send(self, memory: Tensor, peer: int) -> None:
        group = self._group if peer > self._group.rank else self._back
        with group.ledger.about("activations"):
            self._sent.append((group.send(memory, peer, wait=False), memory))

    def _let_go(self) -> None:
        """Free the memory of what is known to be gone, but for one piece."""
        waiting = []
        for handle, memory in self._sent:
            if handle.done():
                handle.wait()  # closes its entry in the ledger
                self._spare = memory
            else:
                waiting.append((handle, memory))
        self._sent = waiting

    def _post(self, spec: Spec | None, leaves: Sequence[Leaf], peer: int) -> Posted:
        memory = torch.empty(message.size(leaves), dtype=torch.uint8, device=self._device)
        group = self._from(peer)
        with group.ledger.about("activations"):
            return Posted(spec, leaves, memory, group.recv(memory, peer, wait=False))

    def _receive(self, size: int, peer: int) -> Tensor:
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        group = self._from(peer)
        with group.ledger.about("activations"):
            group.recv(memory, peer)
        return memory

    def _from(self, peer: int) -> Group:
        return self._group if peer < self._group.rank else self._back
