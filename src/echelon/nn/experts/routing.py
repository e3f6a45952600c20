"""The code that all gates share from tokens to routing: logits, choice, capacity, statistics, losses.

An expert has a capacity per sample, so that no division of the batch changes it. Slots over the capacity are
dropped, all first choices before all second ones, and among these by position. With capacity 2, of 4
positions and 2 choices each:

    position        0    1    2    3
    first choice    a    a    a    b         a: positions 0 and 1; position 2 is dropped
    second choice   b    b    c    c         b: position 3, then 0; position 1 is dropped
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from echelon.errors import UserError
from echelon.nn.autograd.second_run import once
from echelon.nn.dropout.training_position import check_samples
from echelon.nn.experts.gate import Gate, Routing, router_dtype
from echelon.nn.experts.recording import record
from echelon.nn.experts.rows import kernels_for


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return x·Wᵀ in float32 at least, of tokens in any type, also inside of autocast."""
    if x.shape[-1] != weight.shape[1]:
        raise UserError(
            f"the gate was made for width={weight.shape[1]}, and its tokens {list(x.shape)} are "
            f"{x.shape[-1]} wide: make the gate with width={x.shape[-1]}"
        )
    dtype = router_dtype(x)
    with _without_autocast(x.device.type):
        # A product of 16-bit numbers is exact in float32: a CUDA device needs no float32 copy of the tokens.
        if x.is_cuda and x.dtype == weight.dtype != dtype and x.numel():
            function: Any = _Product.apply
            logits: Tensor = function(x.flatten(0, -2), weight)
            return logits.view(*x.shape[:-1], len(weight))
        return F.linear(x.to(dtype), weight.to(dtype))


def _without_autocast(device: str) -> AbstractContextManager[object]:
    return torch.autocast(device, enabled=False) if device in ("cpu", "cuda") else nullcontext()


class _Product(torch.autograd.Function):
    """x·Wᵀ of 16 bits in float32. Gradients are rounded to 16 bits, as those of all matrices of that type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradient.to(x.dtype)
        needs_x, needs_weight = ctx.needs_input_grad
        return gradient @ weight if needs_x else None, gradient.t() @ x if needs_weight else None


def _multiply(x: Tensor, matrix: Tensor) -> Tensor:
    if x.is_cuda:
        return torch.mm(x, matrix, out_dtype=torch.float32)
    return x.float() @ matrix.float()


def capacity_of(factor: float, positions: int, top_k: int, num_experts: int) -> int:
    """Return the slots of each sample that an expert takes: `factor` times its fair share, rounded up."""
    return math.ceil(factor * positions * top_k / num_experts)


def over_capacity(indices: Tensor, capacity: int) -> Tensor:
    """Mark the slots [samples, positions, choices] that come too late for their expert."""
    samples, length, top_k = indices.shape
    by_choice = indices.transpose(1, 2).flatten(1)  # [samples, slots]: first choices, then second ones
    experts, order = by_choice.sort(stable=True)
    # Slots of one expert are neighbours now, in order: how many of them come before?
    slots = torch.arange(experts.shape[1], device=indices.device).expand_as(experts)
    before = slots - torch.searchsorted(experts, experts)
    over = torch.empty_like(before, dtype=torch.bool).scatter_(1, order, before >= capacity)
    return over.view(samples, top_k, length).transpose(1, 2)


class Choice(NamedTuple):
    """The experts of each token, [samples, positions, k], and what they were chosen by, [… , experts]."""

    indices: Tensor  # the number of experts: none
    weights: Tensor
    logits: Tensor
    probabilities: Tensor


_MOST_CHOSEN, _MOST_SCORES = 16, 1024  # that a kernel goes through one by one


def _gate_kernels(scores: Tensor, count: int) -> Any:
    """Return the kernels for the choice of `count` of scores, or None: torch operations do the same."""
    if count > _MOST_CHOSEN or scores.shape[-1] > _MOST_SCORES:
        return None
    return kernels_for(scores, (torch.float32,), "gate_kernels")


def largest(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest, in order; of equal ones the first, on every device.

    topk may choose another of two equal scores on another device or in another shape.
    """
    kernels = _gate_kernels(scores, count)
    if kernels is not None:
        indices: Tensor = kernels.largest(scores.detach().reshape(-1, scores.shape[-1]).contiguous(), count)
        return indices.view(*scores.shape[:-1], count)
    return scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., :count]


def top_softmax(logits: Tensor, count: int, *, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return softmax(logits), indices of the `count` largest, and these, with sum 1 if `normalize`."""
    if _gate_kernels(logits, count) is not None:
        function: Any = _TopSoftmax.apply
        chosen: tuple[Tensor, Tensor, Tensor] = function(logits, count, normalize)
        return chosen
    probabilities = logits.softmax(-1)
    indices = largest(probabilities, count)
    weights = probabilities.gather(-1, indices)
    return probabilities, indices, weights / weights.sum(-1, keepdim=True) if normalize else weights


class _TopSoftmax(torch.autograd.Function):
    """One kernel forward, and one backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, count: int, normalize: bool) -> tuple[Tensor, ...]:
        rows = logits.reshape(-1, logits.shape[-1]).contiguous()
        found: tuple[Tensor, ...] = _gate_kernels(rows, count).top_softmax(rows, count, normalize)
        ctx.save_for_backward(*found)
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.normalize = logits.shape, normalize
        return tuple(each.view(*logits.shape[:-1], -1) for each in found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        found = ctx.saved_tensors
        given = [None if each is None else each.contiguous() for each in (gradients[0], gradients[2])]
        if all(each is None for each in given):
            return None, None, None
        kernels = _gate_kernels(found[0], found[1].shape[1])
        gradient: Tensor = kernels.top_softmax_gradient(*given, *found, ctx.normalize)
        return gradient.view(ctx.shape), None, None


def finish(gate: Gate, x: Tensor, choice: Choice, rows: Sequence[Tensor] = ()) -> Routing:
    """Route the tokens of `x` by a gate's choice, and record statistics; `rows`: its own, per token."""
    indices, none = choice.indices, gate.num_experts
    is_true = gate.positions.is_true(indices.shape[1])
    if is_true is not None:
        indices = indices.masked_fill(~is_true[:, None], none)
    kept = indices
    if gate.capacity is not None:
        _check_positions(gate, x)
        # Ranks that share the sequence gather all choices: only the first of two runs may do that.
        kept = indices.masked_fill(once(partial(_late_slots, gate, indices)), none)
    tokens, entropy = _tokens_and_entropy(indices, choice, is_true)
    dropped = tokens - _count(kept, none) if gate.capacity is not None else torch.zeros_like(tokens)
    statistics = torch.stack([tokens, dropped, entropy, *(_sum(row, is_true) for row in rows)])
    weights = choice.weights.masked_fill(kept == none, 0.0).flatten(0, 1)
    return Routing(kept.flatten(0, 1), record(gate, weights, statistics).to(x.dtype))


def _late_slots(gate: Gate, indices: Tensor) -> Tensor:
    """Mark the slots on this rank that are over the capacity of their expert."""
    assert gate.capacity is not None
    length = indices.shape[1]
    positions = gate.positions.whole_length(length)
    capacity = capacity_of(gate.capacity, positions, gate.top_k, gate.num_experts)
    return gate.positions.here(over_capacity(gate.positions.gather(indices), capacity), length)


def _check_positions(gate: Gate, x: Tensor) -> None:
    if x.ndim < 3:
        raise UserError(
            f"capacity={gate.capacity} is a part of the positions of a sample, and the gate's input "
            f"{list(x.shape)} has none; give it [samples, positions, width], or use capacity=None"
        )
    check_samples(f"capacity={gate.capacity}", x.shape)


@torch.no_grad()
def _tokens_and_entropy(
    indices: Tensor, choice: Choice, is_true: Tensor | None
) -> tuple[Tensor, Tensor] | list[Tensor]:
    """Return the slots of each expert, and its share in the entropy. A logit that is infinite or no number
    makes its column none: such a step is refused."""
    probabilities, logits = choice.probabilities, choice.logits
    kernels = _gate_kernels(logits, indices.shape[-1])
    if kernels is not None and is_true is None:
        rows = (each.flatten(0, 1).contiguous() for each in (indices, probabilities.float(), logits))
        sums: Tensor = kernels.statistics(*rows)
        return list(sums.unbind(0))
    entropy = _sum(torch.special.entr(probabilities) + logits * 0, is_true)
    return _count(indices, logits.shape[-1]).to(entropy.dtype), entropy


def _count(indices: Tensor, num_experts: int) -> Tensor:
    """Count the slots of each expert. A token has no expert twice."""
    chosen = torch.zeros(*indices.shape[:2], num_experts + 1, dtype=torch.bool, device=indices.device)
    return chosen.scatter_(-1, indices, True)[..., :num_experts].sum((0, 1))


def _sum(row: Tensor, is_true: Tensor | None) -> Tensor:
    return row.sum((0, 1)) if is_true is None else (row * is_true[:, None]).sum((0, 1))


_EPSILON = 1e-10  # for sums that are all 0


def cv_squared(sums: Tensor) -> Tensor:
    """Return the squared coefficient of variation, Var / Mean²: 0 if all experts have the same."""
    return sums.var(correction=0) / (sums.mean().square() + _EPSILON)


def switch_balance(chosen: Tensor, probability: Tensor, num_tokens: Tensor) -> Tensor:
    """Return E · Σ_i f_i · P_i: f_i is the fraction of choices of expert i, P_i its mean probability.

    1 if both are uniform, E if one expert has all. Gradients go through P, because f has none.
    """
    fractions, means = chosen / chosen.sum(), probability / num_tokens
    return len(chosen) * (fractions * means).sum()


def z_row(logits: Tensor, weight: float) -> Tensor:
    """Return the router z-loss of each token, (log Σ exp logits)², the same part in each column.

    One row of zeros where the loss has no `weight`.
    """
    if not weight:
        return logits.new_zeros(1, 1, logits.shape[-1])
    return (logits.logsumexp(-1, keepdim=True).square() / logits.shape[-1]).expand_as(logits)
