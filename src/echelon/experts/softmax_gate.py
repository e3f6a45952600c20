"""Softmax over all experts, of which each token takes the k largest: Mixtral, Qwen-MoE, DeepSeek-MoE."""

from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.experts.gate import Gate
from echelon.experts.recording import record
from echelon.experts.routing import Routing


@final
class SoftmaxGate(Gate):
    """G = softmax(x·Wᵀ), of which the k largest stay; they sum to 1 if `normalize`. In float32 at least.

    `balance` weighs the loss E · Σ_i f_i · P_i: f_i is the fraction of slots of expert i, P_i its mean
    probability.
    """

    rows: ClassVar[tuple[str, ...]] = (*Gate.rows, "probability")

    def __init__(
        self, width: int, num_experts: int, top_k: int, *, normalize: bool = True, balance: float = 0.0
    ) -> None:
        super().__init__(num_experts, top_k)
        self.normalize, self.balance = normalize, balance
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Routing:
        dtype = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.flatten(0, -2).to(dtype), self.weight.to(dtype))
        probabilities = logits.softmax(-1)
        weights, indices = probabilities.topk(self.top_k)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        tokens = F.one_hot(indices, self.num_experts).sum((0, 1)).to(dtype)
        entropy = torch.special.entr(probabilities.detach()).sum(0)
        statistics = torch.stack([tokens, torch.zeros_like(tokens), entropy, probabilities.sum(0)])
        return Routing(indices, record(self, weights, statistics).to(x.dtype))

    @property
    def has_loss(self) -> bool:
        return self.balance > 0

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        tokens, _, _, probability = statistics
        slots = tokens.sum()
        fractions, means = tokens / slots, probability * self.top_k / slots
        loss: Tensor = self.balance * self.num_experts * (fractions * means).sum()
        return loss
