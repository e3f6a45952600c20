"""How far attention is from float64, by torch and in a ring of ranks that are threads."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.parallel.context import put_together, take
from echelon.parallel.context.blocks import QueryState
from echelon.parallel.context.ring import _Backward, _forward
from tests.nccl_like import NcclWorld

# Kernels return bfloat16 for each block. To round parts and then their sum is √2 times the error of rounding
# the sum alone, at most.
MOST_ERROR = 1.5


class Shape(NamedTuple):
    """Of attention; `transposed`: in memory as models have it, [batch, tokens, heads, width]."""

    heads: int
    kv_heads: int
    tokens: int
    width: int = 64
    transposed: bool = False


def inputs(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Query, key, value and the gradient of the result."""
    torch.manual_seed(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    tensors = [torch.randn(2, shape.tokens, each, shape.width, device=device).to(dtype) for each in heads]
    by_head = [x.transpose(1, 2) for x in tensors]
    return by_head if shape.transposed else [x.contiguous() for x in by_head]


def by_torch(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The result and the gradients."""
    query, key, value, gradient = (x.to(dtype) for x in tensors)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    out = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True, enable_gqa=True)
    out.backward(gradient)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def in_ring(tensors: list[Tensor], ranks: int = 4) -> list[Tensor]:
    """The same, of ranks that are threads. Autograd has one thread for a GPU, so ranks call the passes."""
    world, scale = NcclWorld(ranks), tensors[0].shape[-1] ** -0.5

    @torch.no_grad()
    def run(rank: int) -> list[Tensor]:
        group = world.group("context", range(ranks), rank)
        query, key, value, gradient = (_take_as_it_lies(x, rank, ranks) for x in tensors)
        out, sums = _forward(query, key, value, group, scale)
        state = QueryState(query, gradient, out.to(query.dtype), sums)
        gradients = _Backward(state, group, scale).run(torch.stack([key, value]), returns=True)
        return [state.out, *(x.to(query.dtype) for x in gradients)]

    return [put_together(parts, dim=2) for parts in zip(*world.run(run), strict=True)]


def _take_as_it_lies(x: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's part, transposed in memory if the whole is."""
    return (
        take(x, rank, ranks, dim=2)
        if x.is_contiguous()
        else take(x.transpose(1, 2), rank, ranks).transpose(1, 2)
    )


def errors(results: list[Tensor], exact: list[Tensor]) -> list[float]:
    """The root of the mean square of what is wrong."""
    pairs = zip(results, exact, strict=True)
    return [float((result.double() - value).square().mean().sqrt()) for result, value in pairs]
