"""From the choice of a gate to its routing: capacity, padding, and the statistics. The same for all gates."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.nn.autograd.second_run import once
from echelon.nn.dropout import check_samples
from echelon.nn.experts.capacity import capacity_of, over_capacity
from echelon.nn.experts.gates.gate import Gate
from echelon.nn.experts.gates.routing import Routing
from echelon.nn.experts.recording import record


class Choice(NamedTuple):
    """The experts of each token, [samples, positions, k], and what they were chosen by, [… , experts]."""

    indices: Tensor  # the number of experts: none
    weights: Tensor
    logits: Tensor
    probabilities: Tensor


def largest(scores: Tensor, count: int) -> Tensor:
    """The indices of the `count` largest, in order; of equal ones the first, on every device."""
    return scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., :count]


def finish(gate: Gate, x: Tensor, choice: Choice, rows: Sequence[Tensor] = ()) -> Routing:
    """The routing of `x`, as the gate was given it. `rows`: the gate's own, of each token."""
    indices, none = choice.indices, gate.num_experts
    is_true = gate.positions.is_true(indices.shape[1])
    if is_true is not None:
        indices = indices.masked_fill(~is_true[:, None], none)
    routed = kept = indices
    if gate.capacity is not None:
        _check_positions(gate, x)
        kept = indices.masked_fill(once(partial(_late_slots, gate, indices)), none)
    tokens = _count(routed, none)
    dropped = tokens - _count(kept, none) if gate.capacity is not None else torch.zeros_like(tokens)
    # A logit that is infinite or no number makes its column none: such a step is refused.
    entropy = torch.special.entr(choice.probabilities.detach()) + choice.logits.detach() * 0
    sums = [_sum(row, is_true) for row in (entropy, *rows)]
    statistics = torch.stack([tokens.to(entropy.dtype), dropped.to(entropy.dtype), *sums])
    weights = choice.weights.masked_fill(kept == none, 0.0).flatten(0, 1)
    return Routing(kept.flatten(0, 1), record(gate, weights, statistics).to(x.dtype))


def _late_slots(gate: Gate, indices: Tensor) -> Tensor:
    """The slots here that are over the capacity of their expert."""
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


def _count(indices: Tensor, num_experts: int) -> Tensor:
    """How many slots each expert has. A token has no expert twice."""
    chosen = torch.zeros(*indices.shape[:2], num_experts + 1, dtype=torch.bool, device=indices.device)
    return chosen.scatter_(-1, indices, True)[..., :num_experts].sum((0, 1))


def _sum(row: Tensor, is_true: Tensor | None) -> Tensor:
    return row.sum((0, 1)) if is_true is None else (row * is_true[:, None]).sum((0, 1))
