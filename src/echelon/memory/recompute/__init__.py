"""Recompute: saved activations are dropped in the forward pass and computed again in the backward pass.

segment             the heart: layers that drop what autograd saves, and run again when it is asked for
layer_call          one call of a layer: what its second run must find as the first
arguments           of a call: kept tensors, and references to what the layer before returned
checkpoints         how arguments are kept: as they are,
split_checkpoints       in parts over tensor ranks,
contiguous              in one preallocated memory (slots)
buffers             those that a forward changes
surroundings        dropout, generators, autocast, modes, view
second_run_check    the first step: a second run returns the same
segments            which layers form segments
budget              which layers form segments so that a budget suffices, from measured_layers (budget_model)
budget_stage        the layers of a stage under a budget, which the stages of a rank share (rank_budget)
selective           another way: no layer runs again, only what is large and cheap
"""

from echelon.memory.recompute.budget_stage import BudgetedStage, BudgetSettings
from echelon.memory.recompute.checkpoints import Checkpoints, Kept, WholeCheckpoints
from echelon.memory.recompute.contiguous import ContiguousCheckpoints
from echelon.memory.recompute.layer_call import weight_storages
from echelon.memory.recompute.rank_budget import RankBudget
from echelon.memory.recompute.second_run_check import SecondRunCheck
from echelon.memory.recompute.segment import Segment, SegmentSettings
from echelon.memory.recompute.segments import backward_follows, divide
from echelon.memory.recompute.split_checkpoints import SplitCheckpoints

__all__ = [
    "BudgetSettings",
    "BudgetedStage",
    "Checkpoints",
    "ContiguousCheckpoints",
    "Kept",
    "RankBudget",
    "SecondRunCheck",
    "Segment",
    "SegmentSettings",
    "SplitCheckpoints",
    "WholeCheckpoints",
    "backward_follows",
    "divide",
    "weight_storages",
]
