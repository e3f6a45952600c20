"""Mixture of experts on one device: gates that route tokens, experts that compute them, balancing losses.

Nothing here communicates. `expert_parallel` spreads experts over ranks; the engine sums what balancing losses
are computed of over the global batch.
"""

from echelon.nn.experts.compute import grouped_experts, routed_experts
from echelon.nn.experts.gate import Gate, Positions, Routing
from echelon.nn.experts.layer import Experts, MixtureOfExperts
from echelon.nn.experts.noisy_gates import HierarchicalGate, NoisyTopKGate
from echelon.nn.experts.recording import (
    Recorder,
    after_step,
    auxiliary_loss,
    current_recorder,
    gates_of,
    record,
    recording,
)
from echelon.nn.experts.routing import Choice, finish
from echelon.nn.experts.sigmoid_gate import SigmoidGate
from echelon.nn.experts.softmax_gates import ExpertChoiceGate, GShardGate, SoftmaxGate, SwitchGate

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
