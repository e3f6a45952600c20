"""Mixture of experts on one device: gates that route tokens, experts that compute them, balancing losses.

Nothing here communicates. `expert_parallel` spreads experts over ranks; the engine sums what balancing losses
are computed of over the global batch.
"""

from echelon.nn.experts.compute import grouped_experts, routed_experts
from echelon.nn.experts.gates.choice import Choice, finish
from echelon.nn.experts.gates.expert_choice_gate import ExpertChoiceGate
from echelon.nn.experts.gates.gate import Gate
from echelon.nn.experts.gates.gshard_gate import GShardGate
from echelon.nn.experts.gates.hierarchical_gate import HierarchicalGate
from echelon.nn.experts.gates.noisy_gate import NoisyTopKGate
from echelon.nn.experts.gates.routing import Routing
from echelon.nn.experts.gates.sigmoid_gate import SigmoidGate
from echelon.nn.experts.gates.softmax_gate import SoftmaxGate
from echelon.nn.experts.gates.switch_gate import SwitchGate
from echelon.nn.experts.layer import MixtureOfExperts
from echelon.nn.experts.module import Experts
from echelon.nn.experts.positions import Positions
from echelon.nn.experts.recording import (
    Recorder,
    after_step,
    auxiliary_loss,
    current_recorder,
    gates_of,
    record,
    recording,
)

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
