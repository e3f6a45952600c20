"""Ring attention: each rank keeps its queries, and keys and values travel around the ring.

Every rank holds 1/C of the sequence (see `parts`). It sees every rank's keys and values, its own first, then
those of both neighbours, and so on; the next ones arrive while it computes (`ring_exchange`). Results are
merged by their log-sums. The backward pass keeps only query, key, value, result and log-sums, and goes around
the ring again. Gradients of keys and values travel behind their block (`returning_gradients`).

Bytes that a rank sends, where K is the size of its keys and values and G that of their gradients (at least
float32), about half of them in each direction:

    forward    (C−1) · K
    backward   (C−1) · (K + G)        (C−1) · K if neither keys nor values need gradients

Ranks sum in different orders, each in the same order in every run. Only kernels of a GPU may differ in the
last bits from run to run.
"""

import math
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.collectives import Group
from echelon.nn.tracing import untraced
from echelon.parallel.context import tiles
from echelon.parallel.context.flash import find_kernel
from echelon.parallel.context.inputs import check_inputs
from echelon.parallel.context.parts import block_of
from echelon.parallel.context.ring_exchange import Exchange, Message, RingBlock, reach, rounds, start_exchange
from echelon.parallel.context.tiles import Gradients, QueryState, wide


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
        """What this rank's queries contribute to the gradients of these keys and values."""
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


# Attention of some queries to one block of keys, by a kernel or in tiles, and how results over blocks
# merge.


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Result and log-sums. If `causal`, queries and keys are the same positions."""
    query, key, value = (x.contiguous() for x in (query, key, value))
    kernel = find_kernel(query, key, value, causal=causal)
    if kernel is None:
        return tiles.attend(query, key, value, causal=causal, scale=scale)
    return kernel.forward(query, key, value, causal, scale)


def merge(out: Tensor, sums: Tensor, other_out: Tensor, other_sums: Tensor) -> None:
    """Turn `out` and `sums`, in place, into the result of the same queries over both sets of keys.

    They are in the wide type. A GPU reads and writes `out` once: most of the cost of a merge.
    """
    weight = torch.sigmoid(other_sums - sums)[..., None]
    out.lerp_(other_out.to(out.dtype), weight)
    sums.copy_(torch.logaddexp(sums, other_sums))


def add_gradients(
    into: Gradients,
    queries: QueryState,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    scale: float,
    is_first: bool = False,
) -> None:
    """Fill in the gradients of these keys and values, and add what they contribute to that of the queries.

    `is_first`: that of the queries holds nothing yet. A GPU writes memory once where it need not add.
    """
    queries = QueryState(*(x.contiguous() for x in queries))
    key, value = key.contiguous(), value.contiguous()
    kernel = find_kernel(queries.query, key, value, causal=causal)
    if kernel is None:
        for empty in into if is_first else into[1:]:
            empty.zero_()
        tiles.add_gradients(into, queries, key, value, causal=causal, scale=scale)
        return
    query, gradient, out, sums = queries
    for_query, *others = kernel.backward(gradient, query, key, value, out, sums, causal, scale)
    if is_first:
        into.query.copy_(for_query)
    else:
        into.query.add_(for_query)
    for empty, part in zip(into[1:], others, strict=True):
        empty.copy_(part)
