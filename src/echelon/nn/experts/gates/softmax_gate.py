"""Softmax over all experts, of which each token takes the k largest: Mixtral, Qwen-MoE, DeepSeek-MoE."""

from typing import ClassVar, final

import torch
from torch import Tensor, nn

from echelon.nn.dropout import KeyedNoise
from echelon.nn.experts.gates.choice import Choice, finish, largest
from echelon.nn.experts.gates.gate import Gate
from echelon.nn.experts.gates.gate_checks import normalize_errors, size_errors, weight_errors
from echelon.nn.experts.gates.router import router_logits
from echelon.nn.experts.gates.routing import Routing
from echelon.nn.experts.losses import no_row, switch_balance, z_row
from echelon.nn.experts.positions import as_samples, router_dtype


class SoftmaxRouter(Gate):
    """What the gates have in common that take the k largest of a softmax."""

    rows: ClassVar[tuple[str, ...]] = (*Gate.rows, "probability", "z")

    def __init__(
        self,
        width: int,
        num_experts: int,
        top_k: int,
        *,
        normalize: bool = True,
        balance: float = 0.0,
        z_loss: float = 0.0,
        capacity: float | None = None,
        jitter: float = 0.0,
    ) -> None:
        errors = [
            *size_errors(width=width),
            *normalize_errors(top_k, normalize),
            *weight_errors(balance=balance, z_loss=z_loss, jitter=jitter),
        ]
        super().__init__(num_experts, top_k, capacity, errors)
        self.normalize, self.balance, self.z_loss, self.jitter = normalize, balance, z_loss, jitter
        if jitter > 0:
            self.noise = KeyedNoise()
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def route(self, x: Tensor) -> Routing:
        logits = router_logits(self._jittered(as_samples(x)), self.weight)
        probabilities = logits.softmax(-1)
        indices = largest(probabilities, self.top_k)
        weights = probabilities.gather(-1, indices)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        z = z_row(logits) if self.z_loss else no_row(logits)
        choice = Choice(indices, weights, logits, probabilities)
        return finish(self, x, choice, [probabilities, z])

    def _jittered(self, x: Tensor) -> Tensor:
        """In training, each input of the router times a number from 1 − jitter to 1 + jitter."""
        if self.noise is None or not self.training:
            return x
        x = x.to(router_dtype(x))
        uniform = self.noise.uniform(x.shape, x, self.positions.numbers(x.shape[1]))
        return x * (1 + self.jitter * (2 * uniform - 1))

    @property
    def has_loss(self) -> bool:
        return self.balance > 0 or self.z_loss > 0

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        tokens, _, _, probability, z = statistics
        num_tokens = tokens.sum() / self.top_k
        balance = switch_balance(tokens, probability, num_tokens)
        loss: Tensor = self.balance * balance + self.z_loss * z.sum() / num_tokens
        return loss


@final
class SoftmaxGate(SoftmaxRouter):
    """G = softmax(x·Wᵀ), of which the k largest stay; they sum to 1 if `normalize`. In float32 at least.

    `balance` weighs the loss E · Σ_i f_i · P_i: f_i is the fraction of slots of expert i, P_i its mean
    probability. `z_loss` weighs the mean of (log Σ exp logits)², which keeps logits small. `jitter`: in
    training, the inputs of the gate are multiplied by random numbers from 1 − jitter to 1 + jitter.
    """
