"""The feed-forward part of a block as its config says: dense, or a mixture of experts."""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn

from echelon.experts import Experts, Gate, MixtureOfExperts, SoftmaxGate
from echelon.models.blocks import Linear, residual_std
from echelon.models.config import ModelConfig
from echelon.models.experts_config import ExpertsConfig

Dense = Callable[[ModelConfig, int], nn.Module]  # of a hidden width


def feed_forward(config: ModelConfig, layer: int, dense: Dense) -> nn.Module:
    """Of the block `layer`; `dense` makes the family's own feed-forward part."""
    experts = config.experts
    if experts is None or not config.has_experts(layer):
        return dense(config, config.ffn_width)
    gate = make_gate(config.width, experts)
    activation = "gelu" if config.family == "gpt" else "swiglu"
    routed = Experts(experts.num_experts, config.width, experts.hidden, activation, std=residual_std(config))
    return MixtureOfExperts(gate, routed, _shared(config, experts, dense))


def make_gate(width: int, config: ExpertsConfig) -> Gate:
    return _GATES[config.gate](width, config)


def _softmax(width: int, config: ExpertsConfig) -> Gate:
    return SoftmaxGate(
        width, config.num_experts, config.top_k, normalize=config.normalize, balance=config.balance
    )


_GATES: dict[str, Callable[[int, ExpertsConfig], Gate]] = {"softmax": _softmax}


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
