"""Attention of some queries to some keys on plain torch, a tile of scores at a time.

`attend` also returns the log of the sum that each query's softmax was divided by. With it, results over
several sets of keys become one (`merge`), and `add_gradients` makes the probabilities again.

    query, out [batch, heads, s, width]    key, value [batch, kv_heads, t, width]    sums [batch, heads, s]

Queries of the heads that share a key/value head stand below each other as rows of one matrix: keys are never
repeated, and their gradients sum over those heads by themselves. What is computed is float32 at least.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_SCORES = 1 << 22  # in a tile, at most (or those of one position)
_ROWS = 256  # positions in a tile, at most: on the diagonal, smaller tiles waste less on what is masked


class Gradients(NamedTuple):
    """Wide, in the shapes of what they are for."""

    query: Tensor
    key: Tensor
    value: Tensor


class Asked(NamedTuple):
    """Queries, and what is known of their merged result; all but `query` wide."""

    query: Tensor
    gradient: Tensor  # of the result
    sums: Tensor
    delta: Tensor  # result · gradient, [batch, heads, s]

    def at(self, places: slice) -> "Asked":
        return Asked(*(x[:, :, places] for x in self))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to accumulate in."""
    return torch.promote_types(dtype, torch.float32)


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Result and log-sums, both wide. If `causal`, queries and keys are the same positions."""
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


def merge(out: Tensor, sums: Tensor, other_out: Tensor, other_sums: Tensor) -> None:
    """Make `out` and `sums`, in place, those of the same queries over both sets of keys."""
    both = torch.logaddexp(sums, other_sums)
    out.mul_((sums - both).exp_()[..., None]).add_(other_out.mul_((other_sums - both).exp_()[..., None]))
    sums.copy_(both)


def add_gradients(
    into: Gradients, asked: Asked, key: Tensor, value: Tensor, *, causal: bool, scale: float
) -> None:
    """Add to `into` what these keys and values have to do with the gradient of the merged result."""
    key, value = key.to(wide(key.dtype)), value.to(wide(value.dtype))
    query, gradient, sums, delta = (_grouped(x, key) for x in asked)
    for_query = _grouped(into.query, key)
    for rows, seen in _tiles(asked.query, key, causal):
        queries, outer = query[..., rows, :].to(key.dtype), gradient[..., rows, :]
        keys, values = key[:, :, :seen], value[:, :, :seen]
        probabilities = _scores(queries, keys, causal, scale).sub_(sums[..., rows, None]).exp_()
        into.value[:, :, :seen] += _summed(probabilities, outer)
        for_scores = _times(outer, values.mT).sub_(delta[..., rows, None]).mul_(probabilities).mul_(scale)
        into.key[:, :, :seen] += _summed(for_scores, queries)
        for_query[..., rows, :] += _times(for_scores, keys)


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """[batch, heads, …] -> [batch, kv_heads, heads that share one, …], the same memory."""
    grouped: Tensor = x.unflatten(1, (key.shape[1], -1))
    return grouped


def _tiles(query: Tensor, key: Tensor, causal: bool) -> Iterator[tuple[slice, int]]:
    """Which queries at a time, and how many of the keys, from the first on, they attend to."""
    batch, heads, length, _ = query.shape
    most = key.shape[2]
    rows = max(1, min(_ROWS, _SCORES // max(1, batch * heads * most)))
    for begin in range(0, length, rows):
        end = min(begin + rows, length)
        yield slice(begin, end), end if causal else most


def _scores(queries: Tensor, keys: Tensor, causal: bool, scale: float) -> Tensor:
    """[batch, kv_heads, sharing, rows, keys], −inf for those that come later."""
    scores = _times(queries * scale, keys.mT)
    if causal:  # then the last keys are the queries' own positions
        rows = scores.shape[-2]
        later = torch.ones(rows, rows, dtype=torch.bool, device=scores.device).triu_(1)
        scores[..., -rows:].masked_fill_(later, float("-inf"))
    return scores


def _times(left: Tensor, right: Tensor) -> Tensor:
    """[batch, kv_heads, sharing, rows, x] times [batch, kv_heads, x, y]."""
    product: Tensor = (left.flatten(2, 3) @ right).unflatten(2, left.shape[2:4])
    return product


def _summed(left: Tensor, right: Tensor) -> Tensor:
    """Products over all rows of all that share: [batch, kv_heads, x, y]."""
    return left.flatten(2, 3).mT @ right.flatten(2, 3)
