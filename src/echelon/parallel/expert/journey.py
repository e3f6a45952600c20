"""Rows on their way between ranks, and in the backward pass their gradients on the way back.

    forward     start ── other work ── wait         the rows travel meanwhile
    backward     wait ── other work ── start        and so do their gradients: each begins what the other ends

Autograd runs what was computed between the two in the forward pass between them in the backward pass too.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from echelon.collectives import Group, Handle

SUBJECT = "experts"


@final
class Journey:
    """`sent` and `received`: how many rows go to, and come from, each rank of `group`."""

    def __init__(self, group: Group, sent: Sequence[int], received: Sequence[int]) -> None:
        self._group, self._sent, self._received = group, list(sent), list(received)
        # What is under way: what to wait for, the rows that come, and those that leave, whose memory is
        # needed until it is over.
        self._under_way: tuple[Handle, Tensor, Tensor] | None = None

    def reversed(self) -> "Journey":
        """The way back of all rows, to the ranks that they came from."""
        return Journey(self._group, self._received, self._sent)

    def start(self, rows: Tensor) -> Tensor:
        """Begin to send rows; what is returned will hold those that come, after `wait`."""
        arriving: Tensor = _Start.apply(rows, self)  # type: ignore[no-untyped-call]
        return arriving

    def wait(self, arriving: Tensor) -> Tensor:
        """The rows that have come."""
        arrived: Tensor = _Wait.apply(arriving, self)  # type: ignore[no-untyped-call]
        return arrived

    def begin(self, rows: Tensor, *, back: bool) -> Tensor:
        outgoing = rows.contiguous()
        to_all, from_all = (self._received, self._sent) if back else (self._sent, self._received)
        incoming = rows.new_empty(sum(from_all), *rows.shape[1:])
        with self._group.ledger.about(SUBJECT):
            handle = self._group.all_to_all(incoming, outgoing, from_all, to_all, wait=False)
        self._under_way = (handle, incoming, outgoing)
        return incoming

    def end(self) -> Tensor:
        assert self._under_way is not None, "nothing is under way"
        handle, incoming, _ = self._under_way
        self._under_way = None
        handle.wait()
        return incoming


class _Start(torch.autograd.Function):
    runs_once = True  # all ranks take part in its backward pass

    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return journey.begin(rows, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.journey.end(), None


class _Wait(torch.autograd.Function):
    runs_once = True

    @staticmethod
    def forward(ctx: Any, arriving: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        journey.end()
        return arriving.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.journey.begin(gradient, back=True)
        return gradient.new_zeros(()).expand_as(gradient), None  # which `_Start` does not look at
