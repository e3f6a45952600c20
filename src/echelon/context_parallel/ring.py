"""Ring attention: each rank keeps its queries, and keys and values travel around the ring.

Every rank holds 1/C of the sequence (see `parts`). In C rounds it sees every rank's keys and values, its own
first; the next ones arrive while it computes. Results are merged by their log-sums. The backward pass keeps
only query, key, value, result and log-sums, and goes around the ring again. Gradients of keys and values
travel behind their block, every rank adds its part, and they end at the rank that owns the block.

Bytes that a rank sends, where K is the size of its keys and values and G that of their gradients (at least
float32):

    forward    (C−1) · K
    backward   (C−1) · (K + G)        (C−1) · K if neither keys nor values need gradients

Ranks sum in different orders, each in the same order in every run: results are equal to the bit.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.collectives import Group
from echelon.context_parallel.parts import block_of, check_length
from echelon.context_parallel.ring_exchange import Exchange, rounds, start_exchange
from echelon.context_parallel.tiles import Gradients, QueryState, add_gradients, attend, merge
from echelon.errors import raise_errors
from echelon.tracing import untraced


@untraced
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, group: Group, scale: float | None = None
) -> Tensor:
    """Causal attention of this rank's queries over the sequence that the ranks of `group` share.

    query [batch, heads, s, width], key and value [batch, kv_heads, s, width] of the positions that `take`
    gives this rank; kv_heads divides heads. All ranks call it together, in the same order, with equal shapes,
    and so do their backward passes. `scale` is 1/√width by default.
    """
    _check(query, key, value, group)
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
        with torch.autocast(gradient.device.type, enabled=False):
            gradient = gradient.to(sums.dtype)
            queries = QueryState(query, gradient, sums, (gradient * out).sum(-1))
            returning = _ReturningGradients(ctx.group, is_needed=any(ctx.needs_input_grad[1:3]))
            gradients = _backward(queries, key, value, ctx.group, ctx.scale, returning)
        inputs = zip(gradients, (query, key, value), ctx.needs_input_grad[:3], strict=True)
        return *(grad.to(tensor.dtype) if needs else None for grad, tensor, needs in inputs), None, None


def _forward(query: Tensor, key: Tensor, value: Tensor, group: Group, scale: float) -> tuple[Tensor, Tensor]:
    for source, block in rounds(group, torch.stack([key, value])):
        rows, columns, causal = block_of(group.rank, source, query.shape[2])
        result = attend(query[:, :, rows], *block[:, :, :, columns], causal=causal, scale=scale)
        if source == group.rank:  # the first round: every query sees at least itself
            out, sums = result
        else:
            merge(out[:, :, rows], sums[:, :, rows], *result)
    return out, sums


def _backward(
    queries: QueryState,
    key: Tensor,
    value: Tensor,
    group: Group,
    scale: float,
    returning: "_ReturningGradients",
) -> Gradients:
    for_query = torch.zeros_like(queries.gradient)
    for source, block in rounds(group, torch.stack([key, value])):
        rows, columns, causal = block_of(group.rank, source, key.shape[2])
        for_block = torch.zeros_like(block, dtype=for_query.dtype)
        into = Gradients(for_query[:, :, rows], *for_block[:, :, :, columns])
        add_gradients(into, queries.at(rows), *block[:, :, :, columns], causal=causal, scale=scale)
        returning.add(for_block)
    return Gradients(for_query, *returning.finish())


class _ReturningGradients:
    """Gradients of keys and values that travel to the owner of their block; each rank on the way adds a part.

    They travel one hop behind their block, and start at the first rank after the owner. The owner's own part
    stays with it.
    """

    def __init__(self, group: Group, is_needed: bool) -> None:
        self._group, self._is_needed = group, is_needed
        self._own: Tensor | None = None
        self._exchange: Exchange | None = None

    def add(self, gradients: Tensor) -> None:
        """This rank's part for the block of this round; in the first round, for its own block."""
        if self._own is None:
            self._own = gradients
        elif self._is_needed:
            if self._exchange is not None:
                gradients += self._exchange.wait()
            self._exchange = start_exchange(self._group, gradients)

    def finish(self) -> Tensor:
        """The complete gradients of this rank's own block, after the last round."""
        assert self._own is not None
        if self._exchange is not None:
            self._own += self._exchange.wait()
        return self._own


def _check(query: Tensor, key: Tensor, value: Tensor, group: Group) -> None:
    errors = []
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape:
        errors.append(
            f"{shapes}: all must be [batch, heads, sequence, width], key and value of the same shape; "
            "reshape them"
        )
    elif (query.shape[0], *query.shape[2:]) != (key.shape[0], *key.shape[2:]):
        errors.append(
            f"{shapes}: only the number of heads may differ; give all three the same batch, sequence and "
            "width"
        )
    elif query.shape[1] % key.shape[1]:
        errors.append(
            f"{shapes}: {query.shape[1]} heads are not divisible by {key.shape[1]} key/value heads; make the "
            "number of heads a multiple"
        )
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        dtypes = f"query {query.dtype}, key {key.dtype}, value {value.dtype}"
        errors.append(f"{dtypes}: all must have one dtype; cast them")
    raise_errors("ring attention", errors)
    check_length(query.shape[2] * group.size, group.size)
