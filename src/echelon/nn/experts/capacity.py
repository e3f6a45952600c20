"""How many tokens an expert takes: a capacity per sample, so that no division of the batch changes it.

Slots over the capacity are dropped, all first choices before all second ones, and among these by position.
With capacity 2, of 4 positions and 2 choices each:

    position        0    1    2    3
    first choice    a    a    a    b         a: positions 0 and 1; position 2 is dropped
    second choice   b    b    c    c         b: position 3, then 0; position 1 is dropped
"""

import math

import torch
from torch import Tensor


def capacity_of(factor: float, positions: int, top_k: int, num_experts: int) -> int:
    """Slots of each sample that an expert takes: `factor` times its fair share, rounded up."""
    return math.ceil(factor * positions * top_k / num_experts)


def over_capacity(indices: Tensor, capacity: int) -> Tensor:
    """Which slots [samples, positions, choices] come too late for their expert."""
    samples, length, top_k = indices.shape
    by_turn = indices.transpose(1, 2).flatten(1)  # [samples, turns]: all first choices, then all second ones
    experts, order = by_turn.sort(stable=True)
    # Turns of one expert are neighbours now, in order: how many of them come before?
    turns = torch.arange(experts.shape[1], device=indices.device).expand_as(experts)
    before = turns - torch.searchsorted(experts, experts)
    over = torch.empty_like(before, dtype=torch.bool).scatter_(1, order, before >= capacity)
    return over.view(samples, top_k, length).transpose(1, 2)
