"""Mixture of experts on one device: gates that route tokens, experts that compute them, balancing losses.

Nothing here communicates. `expert_parallel` spreads experts over ranks; the engine sums what balancing losses
are computed of over the global batch.
"""

from echelon.experts.compute import grouped_experts, routed_experts
from echelon.experts.gate import Gate
from echelon.experts.layer import MixtureOfExperts
from echelon.experts.module import Experts
from echelon.experts.recording import (
    Recorder,
    auxiliary_loss,
    current_recorder,
    gates_of,
    record,
    recording,
)
from echelon.experts.routing import Routing
from echelon.experts.softmax_gate import SoftmaxGate

__all__ = [
    "Experts",
    "Gate",
    "MixtureOfExperts",
    "Recorder",
    "Routing",
    "SoftmaxGate",
    "auxiliary_loss",
    "current_recorder",
    "gates_of",
    "grouped_experts",
    "record",
    "recording",
    "routed_experts",
]
