"""All-to-all attention: each rank attends with a part of the heads, over the whole sequence.

        [part of the sequence, all heads]  ──all-to-all──>  [whole sequence, part of the heads]
                                                                        │ attention, as on one device
        [part of the sequence, all heads]  <──all-to-all──  [whole sequence, part of the heads]

The bytes that a rank sends in the forward pass, and again in the backward pass, where Q is the size of its
queries and K that of its keys and values:

    (C−1)/C · (2Q + K)

Where there are fewer key/value heads than ranks, each is sent to all ranks whose heads share it: K counts it
for each.
"""

import math
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from echelon.collectives import Group
from echelon.errors import raise_errors
from echelon.nn.tracing import untraced
from echelon.parallel.context.parts import SharedView, check_inputs, put_together, take


@untraced
def all_to_all_attention(
    query: Tensor, key: Tensor, value: Tensor, group: Group, scale: float | None = None
) -> Tensor:
    """Causal attention of this rank's queries over the sequence that the ranks of `group` share.

    query [batch, heads, s, width], key and value [batch, kv_heads, s, width] of the positions that `take`
    gives this rank. All ranks call it together, and so do their backward passes.
    """
    check_inputs("all-to-all attention", query, key, value, group)
    ranks = group.size
    raise_errors("all-to-all attention", head_errors(query.shape[1], key.shape[1], ranks))
    key, value = (_repeat(x, ranks) for x in (key, value))
    by_rank = [x.unflatten(1, (ranks, -1)) for x in (query, key, value)]
    received = _exchange(torch.cat(by_rank, 2).movedim(1, 0), group)  # [ranks, batch, heads, s, width]
    whole = put_together(received.unbind(), dim=2)
    query, key, value = whole.split([x.shape[2] for x in by_rank], 1)
    is_grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped
    )
    parts = torch.stack([take(out, rank, ranks, dim=2) for rank in range(ranks)])
    mixed: Tensor = _exchange(parts, group).movedim(0, 1).flatten(1, 2)
    return mixed


@final
class AllToAllView(SharedView):
    """Each rank attends with a part of the heads, over the whole sequence."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        return all_to_all_attention(query, key, value, self._group, scale)


def head_errors(heads: int, kv_heads: int, context: int, tensor: int = 1) -> list[str]:
    """Why `context` ranks cannot each take a part of the heads; `tensor` ranks have split them before."""
    ranks = f"attention=all-to-all context={context}" + (f" tensor={tensor}" if tensor > 1 else "")
    undivided = f"{heads} heads" if heads % tensor else f"{kv_heads} key/value heads"
    if heads % tensor or kv_heads % tensor:
        return [
            f"{ranks}: {undivided} are not divisible by tensor={tensor}; use a tensor that divides "
            f"{math.gcd(heads, kv_heads)}"
        ]
    errors = []
    if heads % (context * tensor):
        errors.append(
            f"{ranks}: {heads} heads are not divisible by {context * tensor} ranks; use a context that "
            f"divides {heads // tensor}, or attention=ring"
        )
    local = kv_heads // tensor
    if kv_heads != heads and local % context and context % local:
        errors.append(
            f"{ranks}: {kv_heads} key/value heads over {context * tensor} ranks are neither the same number "
            f"for each rank nor one for several ranks; use a context that divides {local} or is a multiple "
            "of it, or attention=ring"
        )
    return errors


def _repeat(x: Tensor, ranks: int) -> Tensor:
    """Keys or values with a head for every rank."""
    times = max(1, ranks // x.shape[1])
    return x.repeat_interleave(times, 1) if times > 1 else x


def _exchange(parts: Tensor, group: Group) -> Tensor:
    """Part q of rank r becomes part r of rank q; dim 0 counts parts."""
    exchanged: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(Function):
    """Its transpose is itself: gradients return the way that the parts came."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Group) -> Tensor:
        ctx.group = group
        outgoing = parts.contiguous()
        incoming = torch.empty_like(outgoing)
        with group.ledger.about("context"):
            group.all_to_all(incoming, outgoing)
        return incoming

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, ctx.group), None
