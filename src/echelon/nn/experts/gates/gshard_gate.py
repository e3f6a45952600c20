"""The gate of GShard: two experts for each token, the second one at random."""

from typing import ClassVar, final

import torch
from torch import Tensor, nn

from echelon.nn.dropout import KeyedNoise
from echelon.nn.experts.gates.choice import Choice, finish, largest
from echelon.nn.experts.gates.gate import Gate
from echelon.nn.experts.gates.gate_checks import size_errors, weight_errors
from echelon.nn.experts.gates.router import router_logits
from echelon.nn.experts.gates.routing import Routing
from echelon.nn.experts.losses import no_row, switch_balance, z_row
from echelon.nn.experts.positions import as_samples


@final
class GShardGate(Gate):
    """The two largest of softmax(x·Wᵀ), g₁ and g₂, normalized to g₁ + g₂ = 1. In float32 at least.

    In training the second expert is used with probability 2·g₂: where it counts little, a token takes one
    expert. In evaluation it is always used. `balance` weighs the loss E · Σ_i f_i · P_i, where f_i is the
    fraction of tokens whose first choice is i, and P_i the mean probability of i (the paper's, times E²).
    The paper has capacity=1.
    """

    rows: ClassVar[tuple[str, ...]] = (*Gate.rows, "probability", "z", "first")

    def __init__(
        self,
        width: int,
        num_experts: int,
        *,
        balance: float = 0.01,
        z_loss: float = 0.0,
        capacity: float | None = None,
    ) -> None:
        errors = [*size_errors(width=width), *weight_errors(balance=balance, z_loss=z_loss)]
        super().__init__(num_experts, 2, capacity, errors)
        self.balance, self.z_loss = balance, z_loss
        self.noise = KeyedNoise()
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def route(self, x: Tensor) -> Routing:
        logits = router_logits(as_samples(x), self.weight)
        probabilities = logits.softmax(-1)
        indices = largest(probabilities, 2)
        weights = probabilities.gather(-1, indices)
        weights = weights / weights.sum(-1, keepdim=True)
        first = torch.zeros_like(logits).scatter_(-1, indices[..., :1], 1.0)
        if self.training:
            first_choice, second = indices.split(1, -1)
            second = second.masked_fill(~self._uses_second(weights[..., 1:].detach()), self.num_experts)
            indices = torch.cat([first_choice, second], -1)
        z = z_row(logits) if self.z_loss else no_row(logits)
        return finish(self, x, Choice(indices, weights, logits, probabilities), [probabilities, z, first])

    def _uses_second(self, weight: Tensor) -> Tensor:
        assert self.noise is not None
        uniform = self.noise.uniform(weight.shape, weight, self.positions.numbers(weight.shape[1]))
        return 2 * weight > uniform

    @property
    def has_loss(self) -> bool:
        return self.balance > 0 or self.z_loss > 0

    def num_tokens(self, statistics: Tensor) -> Tensor:
        return statistics[self.rows.index("first")].sum()  # a second choice may be left out

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        _, _, _, probability, z, first = statistics
        num_tokens = self.num_tokens(statistics)
        balance = switch_balance(first, probability, num_tokens)
        loss: Tensor = self.balance * balance + self.z_loss * z.sum() / num_tokens
        return loss
