"""Attention of some queries to some keys in plain torch, one tile of scores at a time.

`attend` also returns the log-sum of each query: the log of its softmax's denominator. With it, results over
several sets of keys are merged, and `add_gradients` computes the probabilities again.

    query, out [batch, heads, s, width]    key, value [batch, kv_heads, t, width]    sums [batch, heads, s]

The queries of heads that share a key/value head are rows of one matrix: keys are never repeated, and their
gradients are summed over those heads by the product. Everything is computed in float32 or wider.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_MAX_SCORES = 1 << 22  # of a tile (or those of one position, if they are more)
_MAX_ROWS = 256  # positions of a tile: on the diagonal, smaller tiles waste less on masked scores


class Gradients(NamedTuple):
    """Gradients of query, key and value, in the wide type."""

    query: Tensor
    key: Tensor
    value: Tensor


class QueryState(NamedTuple):
    """Queries, and what the backward pass needs of their merged result; `sums` are in the wide type."""

    query: Tensor
    gradient: Tensor  # of the result
    out: Tensor
    sums: Tensor

    def from_position(self, begin: int) -> "QueryState":
        """The same from this position on, in contiguous memory."""
        return QueryState(*(x[:, :, begin:].contiguous() for x in self))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to accumulate in."""
    return torch.promote_types(dtype, torch.float32)


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Result and log-sums, both in the wide type. If `causal`, queries and keys are the same positions."""
    key, value = key.to(wide(key.dtype)), value.to(wide(value.dtype))
    out = torch.empty(query.shape, dtype=key.dtype, device=key.device)
    sums = out.new_empty(query.shape[:-1])
    by_key, out_by_key, sums_by_key = (_grouped(x, key) for x in (query, out, sums))
    for rows, seen in _tiles(query, key, causal):
        scores = _scores(by_key[..., rows, :].to(key.dtype), key[:, :, :seen], causal, scale)
        top = scores.amax(-1, keepdim=True)
        total = scores.sub_(top).exp_().sum(-1, keepdim=True)
        out_by_key[..., rows, :] = _times(scores, value[:, :, :seen]).div_(total)
        sums_by_key[..., rows] = total.log_().add_(top).squeeze(-1)
    return out, sums


def add_gradients(
    into: Gradients, queries: QueryState, key: Tensor, value: Tensor, *, causal: bool, scale: float
) -> None:
    """Add to `into` the gradients that these keys and values contribute."""
    key, value = key.to(wide(key.dtype)), value.to(wide(value.dtype))
    outer_gradient = queries.gradient.to(key.dtype)
    product = (outer_gradient * queries.out).sum(-1)  # of result and gradient, [batch, heads, s]
    query, gradient, sums, delta = (
        _grouped(x, key) for x in (queries.query, outer_gradient, queries.sums, product)
    )
    for_query = _grouped(into.query, key)
    for rows, seen in _tiles(queries.query, key, causal):
        tile, outer = query[..., rows, :].to(key.dtype), gradient[..., rows, :]
        keys, values = key[:, :, :seen], value[:, :, :seen]
        probabilities = _scores(tile, keys, causal, scale).sub_(sums[..., rows, None]).exp_()
        into.value[:, :, :seen] += _sum_products(probabilities, outer)
        for_scores = _times(outer, values.mT).sub_(delta[..., rows, None]).mul_(probabilities).mul_(scale)
        into.key[:, :, :seen] += _sum_products(for_scores, tile)
        for_query[..., rows, :] += _times(for_scores, keys)


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """[batch, heads, …] -> [batch, kv_heads, heads per kv_head, …], in the same memory."""
    grouped: Tensor = x.unflatten(1, (key.shape[1], -1))
    return grouped


def _tiles(query: Tensor, key: Tensor, causal: bool) -> Iterator[tuple[slice, int]]:
    """The queries of each tile, and the number of keys, from the first on, that they attend to."""
    batch, heads, length, _ = query.shape
    most = key.shape[2]
    rows = max(1, min(_MAX_ROWS, _MAX_SCORES // max(1, batch * heads * most)))
    for begin in range(0, length, rows):
        end = min(begin + rows, length)
        yield slice(begin, end), end if causal else most


def _scores(queries: Tensor, keys: Tensor, causal: bool, scale: float) -> Tensor:
    """[batch, kv_heads, heads per kv_head, rows, keys], −inf for later keys."""
    scores = _times(queries * scale, keys.mT)
    if causal:  # then the last keys are the queries' own positions
        rows = scores.shape[-2]
        later = torch.ones(rows, rows, dtype=torch.bool, device=scores.device).triu_(1)
        scores[..., -rows:].masked_fill_(later, float("-inf"))
    return scores


def _times(left: Tensor, right: Tensor) -> Tensor:
    """[batch, kv_heads, heads per kv_head, rows, x] times [batch, kv_heads, x, y]."""
    product: Tensor = (left.flatten(2, 3) @ right).unflatten(2, left.shape[2:4])
    return product


def _sum_products(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ · right over all rows of all heads per kv_head: [batch, kv_heads, x, y]."""
    return left.flatten(2, 3).mT @ right.flatten(2, 3)
