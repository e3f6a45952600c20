"""A gate of every kind, for the models of tests."""

from collections.abc import Callable
from functools import partial

from echelon.nn.experts import (
    ExpertChoiceGate,
    Gate,
    GShardGate,
    HierarchicalGate,
    NoisyTopKGate,
    SigmoidGate,
    SoftmaxGate,
    SwitchGate,
)
from tests.nn.experts.models import EXPERTS, WIDTH

GATES: dict[str, Callable[[], Gate]] = {
    "softmax": partial(SoftmaxGate, WIDTH, EXPERTS, 2, balance=0.1),
    "softmax capacity": partial(SoftmaxGate, WIDTH, EXPERTS, 2, balance=0.1, z_loss=0.01, capacity=1.0),
    "noisy": partial(NoisyTopKGate, WIDTH, EXPERTS, 2),
    "noisy capacity": partial(NoisyTopKGate, WIDTH, EXPERTS, 2, z_loss=0.01, capacity=1.25),
    "switch": partial(SwitchGate, WIDTH, EXPERTS, balance=0.1),
    "switch capacity": partial(SwitchGate, WIDTH, EXPERTS, balance=0.1, capacity=1.0, jitter=0.1),
    "gshard": partial(GShardGate, WIDTH, EXPERTS, balance=0.1),
    "gshard capacity": partial(GShardGate, WIDTH, EXPERTS, balance=0.1, capacity=1.0),
    "sigmoid": partial(SigmoidGate, WIDTH, EXPERTS, 2, groups=2, top_groups=1, bias_rate=0.01),
    "hierarchical": partial(HierarchicalGate, WIDTH, 4, 4),
    "expert choice": partial(ExpertChoiceGate, WIDTH, EXPERTS),
}
