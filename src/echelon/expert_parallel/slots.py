"""The slots of tokens, sorted by expert: token t has k of them, one for each of its experts.

    top_k_index     token 0: [2, 0]   token 1: [0, 1]      slots 0 1 | 2 3
    order           1 2 | 3 | 0                            by expert; those of one in the order of tokens
    position        3 0 | 1 2                              of each slot in that order
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Slots(NamedTuple):
    """Where slots lie when they are sorted. Slots of no expert are the last."""

    order: Tensor
    position: Tensor
    counts: Tensor  # slots of each expert
    per_token: int


def sort_slots(top_k_index: Tensor, num_experts: int) -> Slots:
    """Sort the slots of tokens [tokens, k]; an index of `num_experts` is none."""
    experts = top_k_index.flatten()
    order = experts.argsort(stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=order.device)
    counts = experts.new_zeros(num_experts + 1, dtype=torch.int64)
    counts.scatter_add_(0, experts.long(), torch.ones_like(experts, dtype=torch.int64))
    return Slots(order, position, counts[:num_experts], top_k_index.shape[-1])


def take_rows(hidden_states: Tensor, slots: Slots, number: int) -> Tensor:
    """The token of each of the first `number` sorted slots, as rows."""
    rows: Tensor = _TakeRows.apply(hidden_states, slots, number)  # type: ignore[no-untyped-call]
    return rows


def put_back(rows: Tensor, slots: Slots) -> Tensor:
    """Rows of sorted slots as [tokens, k, width]; zeros for slots that have none."""
    missing = len(slots.position) - len(rows)
    if missing:
        rows = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
    return rows.index_select(0, slots.position).unflatten(0, (-1, slots.per_token))


class _TakeRows(torch.autograd.Function):
    """Its gradient is a sum over the slots of each token, in the order of slots: the same in every run."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, slots: Slots, number: int) -> Tensor:
        ctx.slots = slots
        return hidden_states.index_select(0, slots.order[:number] // slots.per_token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return put_back(gradient, ctx.slots).sum(1), None, None
