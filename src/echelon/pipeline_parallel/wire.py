"""Messages between stages: tensors in one piece of memory, sent and received without waiting.

    | code | loss total, count | a flag for each tensor | tensor 0 | tensor 1 | …

A receiver that knows what will come takes memory for it and posts the receive long before. The form of a
gradient is that of its activation. The form of an activation follows from what its microbatch's inputs look
like, mostly: both sides remember it from earlier steps (and use from the next step on what they learn in
one, so that they always agree). Then one message is enough. Its `code` is 0 if all is as remembered; else it
is the length of the true description, which follows, and then the true message. What nobody remembers is
described first.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.collectives import Group, Handle
from echelon.pipeline_parallel.structure import Leaf, Spec

_CODE, _HEAD = 8, 24  # bytes: of the code, and with the two numbers behind it
_NUMBERS = "=qdd"

Key = tuple[int, str]  # the stage that sends, and what its microbatch's inputs look like
Way = tuple[int, Key]  # and the rank at the other end
Tally = tuple[float, float]  # loss total, count


class Posted(NamedTuple):
    """A receive that waits for its message."""

    spec: Spec | None  # of an activation
    leaves: Sequence[Leaf]
    memory: Tensor
    handle: Handle


class Gradients(NamedTuple):
    """The gradient of each tensor that wants one, or None, and the microbatch's loss total and count."""

    tensors: list[Tensor | None]
    tally: Tally


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
            text = torch.frombuffer(bytearray(spec.text.encode()), dtype=torch.uint8)
            first = torch.zeros(_CODE if expected is None else _size(expected.leaves), dtype=torch.uint8)
            first[:_CODE].view(torch.int64).fill_(len(text))
            self._send(first.to(self._device), peer)
            self._send(text.to(self._device), peer)
        self._send(_pack(spec.leaves, tensors, (0.0, 0.0), self._device), peer)

    def post(self, peer: int, key: Key) -> Posted | None:
        """Be ready for an activation, if its form is remembered."""
        spec = self._known.get((peer, key))
        return None if spec is None else self._post(spec, spec.leaves, peer)

    def receive(self, posted: Posted | None, peer: int, key: Key) -> tuple[Spec, list[Tensor]]:
        """An activation, when it is there; `posted`, if its form was remembered."""
        if posted is None:
            length = _code(self._receive(_CODE, peer))
        else:
            posted.handle.wait()
            length = _code(posted.memory)
        if posted is not None and length == 0:
            assert posted.spec is not None
            spec, memory = posted.spec, posted.memory
        else:
            spec = Spec(bytes(self._receive(length, peer).tolist()).decode())
            memory = self._receive(_size(spec.leaves), peer)
        self._learned[peer, key] = spec
        return spec, _places(spec.leaves, memory)

    # Gradients.

    def send_gradients(self, leaves: Sequence[Leaf], gradients: Gradients, peer: int) -> None:
        self._send(_pack(leaves, gradients.tensors, gradients.tally, self._device), peer)

    def post_gradients(self, leaves: Sequence[Leaf], peer: int) -> Posted:
        return self._post(None, leaves, peer)

    def receive_gradients(self, posted: Posted) -> Gradients:
        posted.handle.wait()
        total, count = posted.memory[_CODE:_HEAD].view(torch.float64).tolist()
        flags = posted.memory[_HEAD : _HEAD + len(posted.leaves)].tolist()
        tensors = _places(posted.leaves, posted.memory)
        there = [tensor if flag else None for tensor, flag in zip(tensors, flags, strict=True)]
        return Gradients(there, (total, count))

    # Bytes.

    def _send(self, memory: Tensor, peer: int) -> None:
        self._let_go()
        group = self._group if peer > self._group.rank else self._back
        with group.ledger.about("activations"):
            self._sent.append((group.send(memory, peer, wait=False), memory))

    def _let_go(self) -> None:
        """Free the memory of what is known to be gone."""
        waiting = []
        for handle, memory in self._sent:
            if handle.done():
                handle.wait()  # closes its entry in the ledger
            else:
                waiting.append((handle, memory))
        self._sent = waiting

    def _post(self, spec: Spec | None, leaves: Sequence[Leaf], peer: int) -> Posted:
        memory = torch.empty(_size(leaves), dtype=torch.uint8, device=self._device)
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


class _Layout(NamedTuple):
    """A message's size in bytes, and which of them each tensor has."""

    size: int
    bytes_of: list[slice]


@lru_cache(maxsize=1024)
def _layout(leaves: tuple[Leaf, ...]) -> _Layout:
    """The tensors lie behind a flag for each, aligned."""
    end = -(-(_HEAD + len(leaves)) // 16) * 16
    bytes_of = []
    for leaf in leaves:
        bytes_of.append(slice(end, end + leaf.num_bytes))
        end += leaf.room
    return _Layout(end, bytes_of)


def _size(leaves: Sequence[Leaf]) -> int:
    return _layout(tuple(leaves)).size


def _places(leaves: Sequence[Leaf], memory: Tensor) -> list[Tensor]:
    """Each tensor's place in a message, in its shape and type."""
    bytes_of = _layout(tuple(leaves)).bytes_of
    return [
        memory[each].view(leaf.dtype).view(leaf.shape) for leaf, each in zip(leaves, bytes_of, strict=True)
    ]


@torch.no_grad()
def _pack(
    leaves: Sequence[Leaf], tensors: Sequence[Tensor | None], tally: Tally, device: torch.device
) -> Tensor:
    memory = torch.empty(_size(leaves), dtype=torch.uint8, device=device)
    flags = bytes(tensor is not None for tensor in tensors)
    # In one piece: each small operation on tensors takes longer than all of these bytes.
    head = torch.frombuffer(bytearray(struct.pack(_NUMBERS, 0, *tally) + flags), dtype=torch.uint8)
    memory[: len(head)].copy_(head)
    for place, tensor in zip(_places(leaves, memory), tensors, strict=True):
        if tensor is not None:
            place.copy_(tensor)
    return memory


def _code(memory: Tensor) -> int:
    return int(memory[:_CODE].view(torch.int64).item())
