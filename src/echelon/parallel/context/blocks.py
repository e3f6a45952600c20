"""Attention of some queries to one block of keys, by a kernel of torch or in tiles, and how blocks merge.

    query, out [batch, heads, s, width]    key, value [batch, kv_heads, t, width]    sums [batch, heads, s]

`attend` also returns the log-sum of each query: the log of its softmax's denominator. Results over several
blocks are merged by it. `add_gradients` computes the probabilities again, from the result and the log-sums
over *all* keys: so the gradients of a block are exactly its share, and the shares add up.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

_aten = torch.ops.aten
_MAX_WIDTH = 128  # of a head: the most that every kernel has a backward pass for
_WIDTH_MULTIPLE = 8
_MAX_SCORES = 1 << 22  # of a tile (or those of one position, if they are more)
_MAX_ROWS = 256  # positions of a tile: on the diagonal, smaller tiles waste less on masked scores


class Gradients(NamedTuple):
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
    """Result and log-sums. If `causal`, queries and keys are the same positions."""
    query, key, value = (x.contiguous() for x in (query, key, value))
    kernel = find_kernel(query, key, value, causal=causal)
    if kernel is None:
        return _attend_in_tiles(query, key, value, causal=causal, scale=scale)
    return kernel.forward(query, key, value, causal, scale)


def merge(out: Tensor, sums: Tensor, other_out: Tensor, other_sums: Tensor) -> None:
    """Turn `out` and `sums`, in place, into the result of the same queries over both sets of keys. They are
    in the wide type. A GPU reads and writes `out` once: most of the cost of a merge."""
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
    `is_first`: that of the queries holds nothing yet. A GPU writes memory once where it need not add."""
    queries = QueryState(*(x.contiguous() for x in queries))
    key, value = key.contiguous(), value.contiguous()
    kernel = find_kernel(queries.query, key, value, causal=causal)
    if kernel is None:
        for empty in into if is_first else into[1:]:
            empty.zero_()
        _add_gradients_in_tiles(into, queries, key, value, causal=causal, scale=scale)
        return
    for_query, *others = kernel.backward(queries, key, value, causal, scale)
    if is_first:
        into.query.copy_(for_query)
    else:
        into.query.add_(for_query)
    for empty, part in zip(into[1:], others, strict=True):
        empty.copy_(part)


# In plain torch, one tile of scores at a time. The queries of heads that share a key/value head are rows of
# one matrix: keys are never repeated, and their gradients are summed over those heads by the product.
# Everything is computed in float32 or wider.


def _attend_in_tiles(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
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


def _add_gradients_in_tiles(
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


# By torch's own kernels. None needs repeated keys where several heads share a key/value head.


class Kernel(NamedTuple):
    """One of torch's fused attentions, as functions of (query or queries, key, value, causal, scale)."""

    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[[QueryState, Tensor, Tensor, bool, float], Gradients]


def find_kernel(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Kernel | None:
    """The kernel for these tensors, or None where plain torch operations are faster or more precise. On a
    GPU, the one that `scaled_dot_product_attention` would choose."""
    if query.device.type == "cpu":
        is_exact = query.dtype in (torch.float32, torch.float64)
        return CPU_FLASH if is_exact else None
    is_narrow, width = query.dtype in (torch.bfloat16, torch.float16), query.shape[-1]
    if query.device.type != "cuda" or not is_narrow or width % _WIDTH_MULTIPLE or width > _MAX_WIDTH:
        return None
    is_grouped = query.shape[1] != key.shape[1]
    choice = torch._fused_sdp_choice(query, key, value, is_causal=causal, enable_gqa=is_grouped)
    return _CUDA_KERNELS.get(choice)


# On the CPU.


def _cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, sums = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return out, sums


def _cpu_backward(queries: QueryState, key: Tensor, value: Tensor, causal: bool, scale: float) -> Gradients:
    query, gradient, out, sums = queries
    backward: Any = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return Gradients(*backward(gradient, query, key, value, out, sums, 0.0, causal, scale=scale))


# On a GPU. All arguments are contiguous; nothing is dropped, so that no random state is read.


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    results = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return results[0], results[1]


def _flash_backward(queries: QueryState, key: Tensor, value: Tensor, causal: bool, scale: float) -> Gradients:
    query, gradient, out, sums = queries
    unused = torch.empty(2, dtype=torch.uint64, device=query.device)
    gradients = _aten._scaled_dot_product_flash_attention_backward(
        *(gradient, query, key, value, out, sums),
        *(None, None, query.shape[2], key.shape[2], 0.0, causal, unused, unused),
        scale=scale,
    )
    return Gradients(*gradients)


def _cudnn_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    results = _aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, scale=scale
    )
    out: Tensor = results[0]
    return out, results[1].view(out.shape[:-1])


def _cudnn_backward(queries: QueryState, key: Tensor, value: Tensor, causal: bool, scale: float) -> Gradients:
    query, gradient, out, sums = queries
    unused = torch.empty((), dtype=torch.int64, device=query.device)
    column = sums[..., None] if _cudnn_sums_have_width(query.device) else sums
    gradients = _aten._scaled_dot_product_cudnn_attention_backward(
        *(gradient, query, key, value, out, column),
        *(unused, unused, None, None, None, query.shape[2], key.shape[2], 0.0, causal),
        scale=scale,
    )
    return Gradients(*gradients)


@functools.cache
def _cudnn_sums_have_width(device: torch.device) -> bool:
    """Return whether log-sums are [batch, heads, s, 1]: that depends on the version of torch."""
    probe = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    sums: Tensor = _aten._scaled_dot_product_cudnn_attention(probe, probe, probe, None, True)[1]
    return sums.ndim == probe.ndim


CPU_FLASH = Kernel(_cpu_forward, _cpu_backward)
_CUDA_KERNELS = {
    SDPBackend.FLASH_ATTENTION.value: Kernel(_flash_forward, _flash_backward),
    SDPBackend.CUDNN_ATTENTION.value: Kernel(_cudnn_forward, _cudnn_backward),
}
