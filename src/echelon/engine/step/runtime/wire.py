"""Messages between stages, sent and received without waiting.

A receiver that knows what will come takes memory for it and posts the receive long before. The form of a
gradient is that of its activation. The form of an activation mostly follows from that of its microbatch's
inputs: both sides remember it from earlier steps (and use from the next step on what they learn in one, so
that they always agree). Then one message is enough. The code in its head is 0 if all is as remembered; else
it is the length of the true description, which follows, and then the true message. A form that is not
remembered is described first.

[Note: heads before receives] On a device only the receive of the head is posted ahead, from host to host. A
sender queues its tensors and then sends the head; the receiver queues its receive when the head is there. So
a receive on a device never waits for a host: what it receives is queued. A host may have to wait for all that
its device has queued, in any instruction that computes: a kernel that is launched for the first time is
loaded, memory runs short, an optimizer reads a number. With receives that were queued ahead, PipeDream-2BW
hung there: at its first update a rank waited for its device, that for the receive of the next message, and
its sender for this rank.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import final

import torch
from torch import Tensor

from echelon.collectives import Edge, Edges, Handle
from echelon.engine.step.runtime import message
from echelon.engine.step.runtime.message import CODE_BYTES, TALLY, Gradients, Layout, Leaf, Spec

Key = tuple[int, str]  # the stage that sends, and the form of its microbatch's inputs
Way = tuple[int, Key]  # and the rank at the other end
Sent = tuple[Handle, Tensor]

_SUBJECT, _HOST_SUBJECT = "activations", "heads of activations"  # in the ledger


@final
class Posted:
    """A receive that waits for its message, or, on a device, for its head."""

    def __init__(self, layout: Layout, edge: Edge, device: torch.device, spec: Spec | None) -> None:
        """`spec`: of an activation."""
        self.layout, self.spec, self._edge = layout, spec, edge
        self.memory = torch.empty(layout.size, dtype=torch.uint8, device=device)
        self._head = b""
        self._handle: Handle | None = None
        if edge.host is None:
            self._handle = edge.recv(self.memory, _SUBJECT)
            return
        self._head_memory = torch.empty(layout.head_size, dtype=torch.uint8)
        self._head_handle = edge.host.recv(self._head_memory, _HOST_SUBJECT)
        # The memory is free from here on: the receive need not wait for what is computed meanwhile.
        self._from_here: Callable[[], AbstractContextManager[object]] = edge.group.moment(device)

    def begin(self) -> None:
        """On a device, wait for the head, and queue the receive of what it announces."""
        if self._handle is None and not self._head:
            self._head_handle.wait()
            self._head = message.read_bytes(self._head_memory, self.layout.head_size)
            if message.code_of(self._head) == 0:  # else the description follows, from host to host
                with self._from_here():
                    self._handle = self._edge.recv(self.memory, _SUBJECT)

    def wait(self) -> bytes:
        """Return the head when the message is there, or, on a device, ordered before what follows."""
        self.begin()
        if self._handle is not None:
            self._handle.wait()
        return self._head or message.read_bytes(self.memory, self.layout.head_size)


class Wire:
    """The ways from this rank to the others of a pipeline, and back."""

    def __init__(self, edges: Edges, device: torch.device) -> None:
        self._edges, self._device = edges, device
        self._known: dict[Way, Spec] = {}
        self._learned: dict[Way, Spec] = {}
        # Each send with its memory, which must live until the transfer has read it.
        self._sent: list[Sent] = []  # in this step
        self._earlier: list[Sent] = []  # in the one before
        self._heads: list[Sent] = []  # from host to host, in this step
        self._handles: dict[int, list[Handle]] = {}  # of this step's messages, by the rank that receives
        self._spare: Tensor | None = None  # memory of a finished send: first writes to new pages are slow

    def close(self) -> None:
        """Return when all that was sent is gone."""
        self.finish_step(emptied=True)
        self.finish_step(emptied=True)  # heads are waited for a step later

    def start_step(self) -> None:
        """Use what was learned from here on. Not earlier: the two ends learn at different times of a step."""
        self._known |= self._learned
        self._learned, self._handles = {}, {}

    def acknowledge(self, peer: int, count: int) -> None:
        """`peer` has received the first `count` messages of this step, so waiting for them takes no time:
        free their memory. A host that is far ahead of its GPU would keep all until the step ends."""
        for handle in self._handles.get(peer, [])[:count]:
            handle.wait()
        self._let_go()

    def finish_step(self, *, emptied: bool) -> None:
        """Return when all that was sent is gone; unless the pipeline is `emptied`, what was sent before this
        step: the last messages of a step may be received in the next.

        What went from host to host is waited for a step later, so that hosts need not keep step.
        """
        gone = [*self._earlier, *self._sent] if emptied else self._earlier
        for handle, _ in gone:
            handle.wait()
        self._earlier = self._heads if emptied else [*self._sent, *self._heads]
        self._sent, self._heads = [], []

    # Activations.

    def send(self, spec: Spec, tensors: Sequence[Tensor], peer: int, key: Key) -> None:
        edge, expected = self._edges.outgoing[peer], self._known.get((peer, key))
        self._learned[peer, key] = spec
        if expected != spec:
            self._announce(spec, expected, edge)
        self._send_message(spec.leaves, tensors, peer)

    def post(self, peer: int, key: Key) -> Posted | None:
        """Be ready for an activation, if its form is remembered."""
        spec = self._known.get((peer, key))
        return None if spec is None else self._post(spec.leaves, self._edges.incoming[peer], spec)

    def receive(self, posted: Posted | None, peer: int, key: Key) -> tuple[Spec, list[Tensor]]:
        """An activation, when it is there; `posted`, if its form was remembered."""
        edge = self._edges.incoming[peer]
        head = self._receive_bytes(CODE_BYTES, edge) if posted is None else posted.wait()
        length = message.code_of(head)
        if posted is None or length:
            spec = Spec(self._receive_bytes(length, edge).decode())
            posted = self._post(spec.leaves, edge, spec)
            posted.wait()
        assert posted.spec is not None
        self._learned[peer, key] = posted.spec
        return posted.spec, posted.layout.tensors(posted.memory)

    def _announce(self, spec: Spec, expected: Spec | None, edge: Edge) -> None:
        """Describe what comes; first answer the receive that was posted for another form."""
        text = spec.text.encode()
        head = message.pack_code(len(text)) + bytes(0 if expected is None else len(expected.leaves))
        if expected is None or edge.host is not None:
            self._send_bytes(head, edge)
        else:  # a posted receive ends only with as many bytes as it has memory for
            layout = self._layout(expected.leaves, edge)
            self._send(layout, self._memory(layout.size), head, edge)
        self._send_bytes(text, edge)

    # Gradients.

    def send_gradients(self, leaves: Sequence[Leaf], gradients: Gradients, peer: int) -> None:
        if gradients.tally is None:
            self._send_message(leaves, gradients.tensors, peer)
        else:
            self._send_message([TALLY, *leaves], [gradients.tally, *gradients.tensors], peer)

    def post_gradients(self, leaves: Sequence[Leaf], peer: int, *, tally: bool) -> Posted:
        """Be ready for gradients, and for a `tally` with them."""
        return self._post([TALLY, *leaves] if tally else leaves, self._edges.incoming[peer])

    def receive_gradients(self, posted: Posted) -> Gradients:
        flags = message.flags_of(posted.wait())
        tensors = posted.layout.tensors(posted.memory)
        present = [tensor if flag else None for tensor, flag in zip(tensors, flags, strict=True)]
        if posted.layout.leaves[:1] == (TALLY,):
            return Gradients(present[1:], present[0])
        return Gradients(present)

    # Bytes.

    def _send_message(self, leaves: Sequence[Leaf], tensors: Sequence[Tensor | None], peer: int) -> None:
        self._let_go()
        edge = self._edges.outgoing[peer]
        layout = self._layout(leaves, edge)
        memory = self._memory(layout.size)
        layout.write(memory, tensors)
        self._send(layout, memory, message.pack_code(0) + message.pack_flags(tensors), edge)
        self._handles.setdefault(peer, []).append(self._sent[-1][0])

    def _send(self, layout: Layout, memory: Tensor, head: bytes, edge: Edge) -> None:
        # One queue keeps the order, and heads are received first. Of two, see [Note: heads before receives].
        first = edge.host is not None and edge.host.group is edge.group
        if layout.head_inside:
            message.write_bytes(memory, head)
        elif first:
            self._send_bytes(head, edge)
        self._sent.append((edge.send(memory, _SUBJECT), memory))
        if not layout.head_inside and not first:
            self._send_bytes(head, edge)

    def _send_bytes(self, data: bytes, edge: Edge) -> None:
        memory = message.host_bytes(data)
        if edge.host is None:
            self._sent.append((edge.send(memory, _SUBJECT), memory))
        else:
            self._heads.append((edge.host.send(memory, _HOST_SUBJECT), memory))

    def _receive_bytes(self, length: int, edge: Edge) -> bytes:
        memory = torch.empty(length, dtype=torch.uint8)
        way, subject = (edge, _SUBJECT) if edge.host is None else (edge.host, _HOST_SUBJECT)
        way.recv(memory, subject).wait()
        return message.read_bytes(memory, length)

    def _post(self, leaves: Sequence[Leaf], edge: Edge, spec: Spec | None = None) -> Posted:
        return Posted(self._layout(leaves, edge), edge, self._device, spec)

    def _layout(self, leaves: Sequence[Leaf], edge: Edge) -> Layout:
        return message.layout(tuple(leaves), head_inside=edge.host is None)

    def _memory(self, size: int) -> Tensor:
        spare, self._spare = self._spare, None
        if spare is not None and spare.numel() == size and spare.device == self._device:
            return spare
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _let_go(self) -> None:
        """Free the memory of what is known to be gone, but keep one piece for the next message."""
        waiting = []
        for handle, memory in self._sent:
            if handle.done():
                handle.wait()  # closes its entry in the ledger
                self._spare = memory
            else:
                waiting.append((handle, memory))
        self._sent = waiting
