"""The feed-forward part of a transformer block, as a mixture of experts."""

from typing import final

from torch import Tensor, nn

from echelon.experts.gate import Gate
from echelon.experts.module import Experts


@final
class MixtureOfExperts(nn.Module):
    """y = shared(x) + Σ over the experts that the gate chose, weighted."""

    def __init__(self, gate: Gate, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.experts, self.shared = gate, experts, shared

    def forward(self, x: Tensor) -> Tensor:
        routing = self.gate(x)
        mixed: Tensor = self.experts(x.flatten(0, -2), routing.indices, routing.weights)
        mixed = mixed.view_as(x)
        return mixed if self.shared is None else mixed + self.shared(x)
