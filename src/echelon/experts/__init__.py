"""Mixture of experts on one device: gates that route tokens, experts that compute them, balancing losses.

Nothing here communicates. `expert_parallel` spreads experts over ranks; the engine sums what balancing losses
are computed of over the global batch.
"""

from echelon.experts.choice import Choice, finish
from echelon.experts.compute import grouped_experts, routed_experts
from echelon.experts.expert_choice_gate import ExpertChoiceGate
from echelon.experts.gate import Gate
from echelon.experts.gshard_gate import GShardGate
from echelon.experts.hierarchical_gate import HierarchicalGate
from echelon.experts.layer import MixtureOfExperts
from echelon.experts.module import Experts
from echelon.experts.noisy_gate import NoisyTopKGate
from echelon.experts.positions import Positions
from echelon.experts.recording import (
    Recorder,
    after_step,
    auxiliary_loss,
    current_recorder,
    gates_of,
    record,
    recording,
)
from echelon.experts.routing import Routing
from echelon.experts.sigmoid_gate import SigmoidGate
from echelon.experts.softmax_gate import SoftmaxGate
from echelon.experts.switch_gate import SwitchGate

__all__ = [
    "Choice",
    "ExpertChoiceGate",
    "Experts",
    "GShardGate",
    "Gate",
    "HierarchicalGate",
    "MixtureOfExperts",
    "NoisyTopKGate",
    "Positions",
    "Recorder",
    "Routing",
    "SigmoidGate",
    "SoftmaxGate",
    "SwitchGate",
    "after_step",
    "auxiliary_loss",
    "current_recorder",
    "finish",
    "gates_of",
    "grouped_experts",
    "record",
    "recording",
    "routed_experts",
]
