"""Ring attention: each rank keeps its queries, and keys and values travel around the ring.

Every rank holds 1/C of the sequence (see `parts`). It sees every rank's keys and values, its own first, then
those of both neighbours, and so on; the next ones arrive while it computes (`rounds`). Results are
merged by their log-sums. The backward pass keeps only query, key, value, result and log-sums, and goes around
the ring again. Gradients of keys and values travel behind their block (`ReturningGradients`).

Bytes that a rank sends, where K is the size of its keys and values and G that of their gradients (at least
float32), about half of them in each direction:

    forward    (C−1) · K
    backward   (C−1) · (K + G)        (C−1) · K if neither keys nor values need gradients

Ranks sum in different orders, each in the same order in every run. Only kernels of a GPU may differ in the
last bits from run to run.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.collectives import Group, Handle
from echelon.nn.tracing import untraced
from echelon.parallel.context.blocks import Gradients, QueryState, add_gradients, attend, merge, wide
from echelon.parallel.context.parts import SharedView, block_of, check_inputs


@untraced
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, group: Group, scale: float | None = None
) -> Tensor:
    """Causal attention of this rank's queries over the sequence that the ranks of `group` share.

    query [batch, heads, s, width], key and value [batch, kv_heads, s, width] of the positions that `take`
    gives this rank; kv_heads divides heads. All ranks call it together, in the same order, with equal shapes,
    and so do their backward passes. `scale` is 1/√width by default.
    """
    check_inputs("ring attention", query, key, value, group)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    out: Tensor = _RingAttention.apply(query, key, value, group, factor)  # type: ignore[no-untyped-call]
    return out


@final
class RingView(SharedView):
    """Keys and values travel around the ring of ranks."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        return ring_attention(query, key, value, self._group, scale)


class _RingAttention(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Group, scale: float) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            out, sums = _forward(query, key, value, group, scale)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.group, ctx.scale = group, scale
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None, None
        query, key, value, out, sums = ctx.saved_tensors
        needs_query, *needs_others = ctx.needs_input_grad[:3]
        with torch.autocast(gradient.device.type, enabled=False):
            backward = _Backward(QueryState(query, gradient, out, sums), ctx.group, ctx.scale)
            gradients = backward.run(torch.stack([key, value]), returns=any(needs_others))
        needed = zip(gradients, (needs_query, *needs_others), strict=True)
        return *(grad.to(query.dtype) if needs else None for grad, needs in needed), None, None


def _forward(query: Tensor, key: Tensor, value: Tensor, group: Group, scale: float) -> tuple[Tensor, Tensor]:
    contiguous = cache(lambda begin: query[:, :, begin:].contiguous())  # copied once, not for every block
    for blocks in rounds(group, torch.stack([key, value])):
        for way, source, block in blocks:
            rows, columns, causal = block_of(group.rank, source, query.shape[2])
            result = attend(contiguous(rows.start), *block[:, :, :, columns], causal=causal, scale=scale)
            if way == 0:  # this rank's own keys: every query sees at least itself
                out, sums = result[0].to(wide(query.dtype)), result[1]
            else:
                merge(out[:, :, rows], sums[:, :, rows], *result)
            del block, result
        del blocks
    return out, sums


# Messages around a ring of ranks, in both directions at once.
#
# Every rank passes what it has on to both neighbours, so that half of the blocks come from the left and half
# from the right. C = 5, whose tensors each rank gets in each round:
#
#               round 0   round 1   round 2
#     rank 0       0       4 and 1   3 and 2
#     rank 1       1       0 and 2   4 and 3
#     …
# With an even number of ranks the last round has one block only, from the left.
#
# All messages of a round are one all-to-all in which most ranks have nothing for each other. Over NCCL they
# run at the same time, and no rank waits for another's order: all begin the same operations.


RIGHT, LEFT = 1, -1
WAYS = (RIGHT, LEFT)


class Message(NamedTuple):
    """`tensor` goes to `target`, and one of the same shape comes from `source`."""

    tensor: Tensor
    target: int
    source: int


class Exchange(NamedTuple):
    outgoing: Tensor  # kept alive until it is sent
    incoming: Tensor
    places: tuple[int, ...]  # of the answer to each message, in `incoming`
    handle: Handle

    def wait(self) -> list[Tensor]:
        self.handle.wait()
        return [self.incoming[place] for place in self.places]


class RingBlock(NamedTuple):
    """A tensor of `source` that has travelled `way` (0: this rank's own)."""

    way: int
    source: int
    tensor: Tensor


def start_exchange(group: Group, messages: Sequence[Message]) -> Exchange:
    """Start to send and to receive. All ranks give messages of the same number and shape. Two messages
    between the same two ranks arrive in the order in which both ranks list them."""
    by_target = sorted(messages, key=lambda message: message.target)
    by_source = sorted(range(len(messages)), key=lambda number: messages[number].source)
    tensors = [message.tensor for message in by_target]
    outgoing = torch.stack(tensors) if len(tensors) > 1 else tensors[0][None]
    incoming = torch.empty_like(outgoing)
    rows = ([sum(rank == each[side] for each in messages) for rank in range(group.size)] for side in (2, 1))
    with group.ledger.about("context"):
        handle = group.all_to_all(incoming, outgoing, *rows, wait=False)
    places = tuple(by_source.index(number) for number in range(len(messages)))
    return Exchange(outgoing, incoming, places, handle)


def reach(ranks: int, way: int) -> int:
    """Count the ranks that a tensor travels to in this direction."""
    return ranks // 2 if way == RIGHT else (ranks - 1) // 2


def rounds(group: Group, tensor: Tensor) -> Iterator[list[RingBlock]]:
    """The blocks of each round: first this rank's own, then those of both neighbours, …

    The next ones travel while some are used, so the caller must not change them, and must let go of them
    before it asks for the next: they take memory.
    """
    rank, size = group.rank, group.size
    blocks = [RingBlock(0, rank, tensor)]
    latest = dict.fromkeys(WAYS, tensor)
    for step in range(reach(size, RIGHT) + 1):
        ways = [way for way in WAYS if step < reach(size, way)]
        messages = [Message(latest[way], (rank + way) % size, (rank - way) % size) for way in ways]
        exchange = start_exchange(group, messages) if messages else None
        yield blocks
        if exchange is not None:
            latest = dict(zip(ways, exchange.wait(), strict=True))
            exchange = None  # frees what was sent before the next round takes memory
            blocks = [RingBlock(way, (rank - way * (step + 1)) % size, latest[way]) for way in ways]


# The backward pass.


class _Backward:
    """The backward pass of one rank: `for_query` sums the gradients of its queries, block by block."""

    def __init__(self, queries: QueryState, group: Group, scale: float) -> None:
        self._group, self._scale, self._length = group, scale, queries.query.shape[2]
        self._contiguous = cache(queries.from_position)  # copied once
        self._for_query = torch.empty_like(queries.query, dtype=wide(queries.query.dtype))

    def run(self, keys_and_values: Tensor, *, returns: bool) -> Gradients:
        """`returns`: whether gradients of keys and values are needed, and so return to their owners."""
        all_rounds = rounds(self._group, keys_and_values)
        (own,) = next(all_rounds)
        returning = ReturningGradients(self._group, self._gradients_of(own))
        for blocks in all_rounds:
            if returns:
                returning.add({block.way: self._gradients_of(block) for block in blocks})
            else:
                for block in blocks:
                    self._gradients_of(block)
        return Gradients(self._for_query, *returning.finish())

    def _gradients_of(self, block: RingBlock) -> Tensor:
        """Return the share of this rank's queries in the gradients of these keys and values."""
        rows, columns, causal = block_of(self._group.rank, block.source, self._length)
        gradients = torch.empty_like(block.tensor, dtype=self._for_query.dtype)
        gradients[:, :, :, columns.stop :].zero_()
        into = Gradients(self._for_query[:, :, rows], *gradients[:, :, :, columns])
        key, value = block.tensor[:, :, :, columns]
        options = {"causal": causal, "is_first": block.way == 0}  # this rank's own block: all of its queries
        add_gradients(into, self._contiguous(rows.start), key, value, scale=self._scale, **options)
        return gradients


# Gradients of keys and values on their way to the owner of their block.


@final
class ReturningGradients:
    """This rank's end of the gradients of all blocks, round by round."""

    def __init__(self, group: Group, own: Tensor) -> None:
        """`own`: this rank's part for its own block, to which the others' are added."""
        self._group, self._own = group, own
        self._step = 0  # the last round
        self._ways: list[int] = []
        self._exchange: Exchange | None = None
        self._travelling: dict[int, Tensor] = {}  # for the blocks of the next round

    def add(self, parts: dict[int, Tensor]) -> None:
        """This rank's parts for the blocks of the next round, by the direction that a block travels."""
        self._receive()
        self._step += 1
        for way, part in parts.items():
            if way in self._travelling:
                part += self._travelling.pop(way)
        self._ways = list(parts)
        self._exchange = start_exchange(self._group, [self._message(way, parts[way]) for way in parts])

    def finish(self) -> Tensor:
        """The complete gradients of this rank's own block, after the last round."""
        self._receive()
        return self._own

    def _message(self, way: int, part: Tensor) -> Message:
        hop = -way * self._step if self._is_last(way) else way
        rank, size = self._group.rank, self._group.size
        return Message(part, (rank + hop) % size, (rank - hop) % size)

    def _receive(self) -> None:
        if self._exchange is None:
            return
        received, self._exchange = self._exchange.wait(), None  # what was sent is no longer needed
        for way, gradients in zip(self._ways, received, strict=True):
            if self._is_last(way):
                self._own += gradients
            else:
                self._travelling[way] = gradients

    def _is_last(self, way: int) -> bool:
        return self._step == reach(self._group.size, way)
