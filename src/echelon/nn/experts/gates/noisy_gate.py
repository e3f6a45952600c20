"""Noisy top-k gating (Shazeer et al., 2017), with the losses of importance and load."""

from typing import ClassVar, final

import torch
from torch import Tensor, nn

from echelon.nn.dropout import KeyedNoise
from echelon.nn.experts.gates.choice import Choice, finish
from echelon.nn.experts.gates.gate import Gate
from echelon.nn.experts.gates.gate_checks import size_errors, weight_errors
from echelon.nn.experts.gates.noisy_choice import choose_noisily
from echelon.nn.experts.gates.router import router_logits
from echelon.nn.experts.gates.routing import Routing
from echelon.nn.experts.losses import cv_squared, no_row, z_row
from echelon.nn.experts.positions import as_samples, router_dtype


@final
class NoisyTopKGate(Gate):
    """G = softmax(keep-top-k(H)), H_i = (x·W_g)_i + ε · softplus((x·W_noise)_i), ε ~ N(0, 1) in training.

    `importance` weighs CV(Σ_x G(x))², `load` weighs CV(Σ_x P(x, ·))², where P(x, i) is the probability that i
    is among the k largest if its noise alone is drawn again. Both matrices start at 0: at first the noise
    decides. `z_loss` weighs the mean of (log Σ exp x·W_g)². In float32 at least.

    With top_k=1, as in the paper, the only weight is always 1: the gate then learns of `importance`, `load`
    and `z_loss` alone, and nothing of the model's loss.
    """

    rows: ClassVar[tuple[str, ...]] = (*Gate.rows, "importance", "load", "z")

    def __init__(
        self,
        width: int,
        num_experts: int,
        top_k: int,
        *,
        importance: float = 0.1,
        load: float = 0.1,
        z_loss: float = 0.0,
        capacity: float | None = None,
    ) -> None:
        errors = [
            *size_errors(width=width),
            *weight_errors(importance=importance, load=load, z_loss=z_loss),
        ]
        super().__init__(num_experts, top_k, capacity, errors)
        self.importance, self.load, self.z_loss = importance, load, z_loss
        self.noise = KeyedNoise()
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.noise_weight = nn.Parameter(torch.empty(num_experts, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.noise_weight)

    def route(self, x: Tensor) -> Routing:
        inputs = as_samples(x).to(router_dtype(x))
        clean, spread = router_logits(inputs, self.weight), router_logits(inputs, self.noise_weight)
        noisy = choose_noisily(clean, spread, self._draw(clean), self.top_k)
        importance = torch.zeros_like(clean).scatter(-1, noisy.indices, noisy.weights)
        z = z_row(clean) if self.z_loss else no_row(clean)
        choice = Choice(noisy.indices, noisy.weights, clean + spread, noisy.probabilities)
        return finish(self, x, choice, [importance, noisy.load, z])

    def _draw(self, like: Tensor) -> Tensor | None:
        if not self.training:
            return None
        assert self.noise is not None
        return self.noise.normal(like.shape, like, self.positions.numbers(like.shape[1]))

    @property
    def has_loss(self) -> bool:
        return self.importance > 0 or self.load > 0 or self.z_loss > 0

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        tokens, _, _, importance, load, z = statistics
        balance = self.importance * cv_squared(importance) + self.load * cv_squared(load)
        loss: Tensor = balance + self.z_loss * z.sum() * self.top_k / tokens.sum()
        return loss
