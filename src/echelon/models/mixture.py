"""The feed-forward part of a block as its config says: dense, or a mixture of experts."""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn

from echelon.models.blocks import Linear, residual_std
from echelon.models.config import ModelConfig
from echelon.models.experts_config import GATE_FIELDS, ExpertsConfig
from echelon.nn.experts import (
    Experts,
    Gate,
    GShardGate,
    HierarchicalGate,
    MixtureOfExperts,
    NoisyTopKGate,
    SigmoidGate,
    SoftmaxGate,
    SwitchGate,
)
from echelon.nn.experts.layer import Activation

Dense = Callable[[ModelConfig, int], nn.Module]  # of a hidden width


def feed_forward(config: ModelConfig, layer: int, dense: Dense) -> nn.Module:
    """Of the block `layer`; `dense` makes the family's own feed-forward part."""
    experts = config.experts
    if experts is None or not config.has_experts(layer):
        return dense(config, config.ffn_width)
    gate = make_gate(config.width, experts)
    activation: Activation = "gelu" if config.family == "gpt" else "swiglu"
    routed = Experts(experts.num_experts, config.width, experts.hidden, activation, std=residual_std(config))
    return MixtureOfExperts(gate, routed, _shared(config, experts, dense))


def make_gate(width: int, config: ExpertsConfig) -> Gate:
    """The gate of one layer. A field of the config is the argument of the same name, or of `_ARGUMENTS`."""
    if config.gate == "hierarchical":
        return _hierarchical(width, config)
    top_k = () if config.gate in ("switch", "gshard") else (config.top_k,)  # which choose 1 and 2
    fields = {name: getattr(config, name) for name in GATE_FIELDS[config.gate]}
    arguments = {_ARGUMENTS.get(name, name): value for name, value in fields.items()}
    return _GATES[config.gate](width, config.num_experts, *top_k, **arguments)


def _hierarchical(width: int, config: ExpertsConfig) -> Gate:
    return HierarchicalGate(
        width,
        config.groups,
        config.num_experts // config.groups,
        top_groups=config.num_chosen_groups,
        top_experts=config.top_k // config.num_chosen_groups,
        importance=config.importance,
        load=config.load,
        capacity=config.capacity,
    )


_GATES: dict[str, Callable[..., Gate]] = {
    "softmax": SoftmaxGate,
    "noisy-top-k": NoisyTopKGate,
    "switch": SwitchGate,
    "gshard": GShardGate,
    "sigmoid": SigmoidGate,
}
_ARGUMENTS = {"group_top_k": "top_groups"}


def _shared(config: ModelConfig, experts: ExpertsConfig, dense: Dense) -> nn.Module | None:
    if not experts.shared:
        return None
    expert = dense(config, experts.shared)
    return SharedExpert(expert, config.width) if experts.shared_gate else expert


@final
class SharedExpert(nn.Module):
    """An expert that sees every token, weighted by a sigmoid of the token: Qwen2-MoE."""

    def __init__(self, expert: nn.Module, width: int) -> None:
        super().__init__()
        self.expert = expert
        self.weight = Linear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weighted: Tensor = torch.sigmoid(self.weight(x)) * self.expert(x)
        return weighted
