"""Ring attention: each rank keeps its queries, and the keys and values go round.

Every rank holds 1/C of the sequence, as `parts` cuts it. In C rounds it sees every rank's keys and values,
its own first; the next ones arrive while it computes. Results are merged by their log-sums. Only query, key,
value, result and log-sums are kept for the backward pass, which goes round again. Gradients of keys and
values follow their block, gather up what each rank adds, and come home.

What a rank sends, K being the bytes of its keys and values, G those of their gradients (float32 at least):

    forward    (C−1) · K
    backward   (C−1) · (K + G)        (C−1) · K if neither keys nor values need gradients

Every rank sums in an order of its own, which is the same in each run: so are the bits.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.collectives import Group
from echelon.context_parallel.parts import block_of, check_length
from echelon.context_parallel.passing import Moving, pass_on, rounds
from echelon.context_parallel.tiles import Asked, Gradients, add_gradients, attend, merge
from echelon.errors import raise_errors
from echelon.tracing import untraced


@untraced
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, group: Group, scale: float | None = None
) -> Tensor:
    """Causal attention over the sequence that the ranks of `group` share, for the queries that are here.

    query [batch, heads, s, width], key and value [batch, kv_heads, s, width], where kv_heads divides heads:
    the positions that `take` gives this rank. All ranks call it together, in the same order, with equal
    shapes, and so do their backward passes. `scale` is 1/√width if not given.
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
            asked = Asked(query, gradient, sums, (gradient * out).sum(-1))
            homing = _Homing(ctx.group, passing=any(ctx.needs_input_grad[1:3]))
            made = _backward(asked, key, value, ctx.group, ctx.scale, homing)
        needed = zip(made, (query, key, value), ctx.needs_input_grad[:3], strict=True)
        return *(part.to(like.dtype) if needs else None for part, like, needs in needed), None, None


def _forward(query: Tensor, key: Tensor, value: Tensor, group: Group, scale: float) -> tuple[Tensor, Tensor]:
    for source, held in rounds(group, torch.stack([key, value])):
        queries, seen, causal = block_of(group.rank, source, query.shape[2])
        part = attend(query[:, :, queries], *held[:, :, :, seen], causal=causal, scale=scale)
        if source == group.rank:  # the first round: every query sees at least itself
            out, sums = part
        else:
            merge(out[:, :, queries], sums[:, :, queries], *part)
    return out, sums


def _backward(
    asked: Asked, key: Tensor, value: Tensor, group: Group, scale: float, homing: "_Homing"
) -> Gradients:
    for_query = torch.zeros_like(asked.gradient)
    for source, held in rounds(group, torch.stack([key, value])):
        queries, seen, causal = block_of(group.rank, source, key.shape[2])
        for_held = torch.zeros_like(held, dtype=for_query.dtype)
        into = Gradients(for_query[:, :, queries], *for_held[:, :, :, seen])
        add_gradients(into, asked.at(queries), *held[:, :, :, seen], causal=causal, scale=scale)
        homing.add(for_held)
    return Gradients(for_query, *homing.arrived())


class _Homing:
    """Gradients of keys and values on their way home: each hop, the rank that they visit adds its own.

    They follow their block one hop behind, and begin where it goes first: what a rank adds to its own block
    waits at home.
    """

    def __init__(self, group: Group, passing: bool) -> None:
        self._group, self._passing = group, passing
        self._home: Tensor | None = None
        self._moving: Moving | None = None

    def add(self, gradients: Tensor) -> None:
        """This rank's part for the block of this round; in the first round, its own block."""
        if self._home is None:
            self._home = gradients
        elif self._passing:
            if self._moving is not None:
                gradients += self._moving.wait()
            self._moving = pass_on(self._group, gradients)

    def arrived(self) -> Tensor:
        """The whole gradients of this rank's own block, after the last round."""
        assert self._home is not None
        if self._moving is not None:
            self._home += self._moving.wait()
        return self._home


def _check(query: Tensor, key: Tensor, value: Tensor, group: Group) -> None:
    errors = []
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape:
        errors.append(
            f"{shapes}: must be [batch, heads, sequence, width], key and value of one shape; "
            "reshape what is not"
        )
    elif (query.shape[0], *query.shape[2:]) != (key.shape[0], *key.shape[2:]):
        errors.append(
            f"{shapes}: only the number of heads may differ; give every rank's part of all three the same "
            "batch, sequence and width"
        )
    elif query.shape[1] % key.shape[1]:
        errors.append(
            f"{shapes}: each key/value head serves an equal number of heads; make {query.shape[1]} heads a "
            f"multiple of {key.shape[1]}"
        )
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        errors.append(f"query {query.dtype}, key {key.dtype}, value {value.dtype}: must be of one type; cast")
    raise_errors("ring attention", errors)
    check_length(query.shape[2] * group.size, group.size)
