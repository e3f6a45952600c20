"""Attention of some queries to one block of keys, by a kernel or in tiles, and how results over blocks merge.

This is the one place that chooses. Both ways compute the same: they share log-sums, so that a result of one
can have its gradients from the other.
"""

import torch
from torch import Tensor

from echelon.parallel.context import tiles
from echelon.parallel.context.flash import find_kernel
from echelon.parallel.context.tiles import Gradients, QueryState


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
