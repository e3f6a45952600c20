"""Two-level gating (Shazeer et al., 2017, appendix B): a gate over groups, and a gate in each group."""

from collections.abc import Iterator
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
from echelon.nn.experts.losses import cv_squared
from echelon.nn.experts.positions import as_samples, router_dtype


@final
class HierarchicalGate(Gate):
    """Each token takes `top_groups` of `groups` groups, and `top_experts` experts in each of them.

    Both levels are noisy top-k gates; expert j of group i is weighed by G(x)_i · G_i(x)_j. It is expert
    i · experts_per_group + j of all.

    `importance` weighs CV² of Σ_x G(x)_i · G_i(x)_j over all experts. `load` weighs CV² of
    Load(X)_i · Load_i(X⁽ⁱ⁾)_j / |X⁽ⁱ⁾|, where X⁽ⁱ⁾ are the tokens of group i. So both levels are balanced.

    A level that takes one weighs it with 1, and learns of `importance` and `load` alone: see `NoisyTopKGate`.
    """

    rows: ClassVar[tuple[str, ...]] = (*Gate.rows, "importance", "group_load", "load", "group_tokens")

    def __init__(
        self,
        width: int,
        groups: int,
        experts_per_group: int,
        *,
        top_groups: int = 2,
        top_experts: int = 2,
        importance: float = 0.1,
        load: float = 0.1,
        capacity: float | None = None,
    ) -> None:
        errors = [
            *size_errors(width=width, groups=groups, experts_per_group=experts_per_group),
            *_level_errors(groups, experts_per_group, top_groups, top_experts),
            *weight_errors(importance=importance, load=load),
        ]
        # Where a level has an error, that of their product says nothing more.
        num_experts = 1 if errors else groups * experts_per_group
        super().__init__(num_experts, 1 if errors else top_groups * top_experts, capacity, errors)
        self.groups, self.top_groups, self.top_experts = groups, top_groups, top_experts
        self.importance, self.load = importance, load
        self.noise = KeyedNoise()
        self.group_weight = nn.Parameter(torch.empty(groups, width))
        self.group_noise_weight = nn.Parameter(torch.empty(groups, width))
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.noise_weight = nn.Parameter(torch.empty(num_experts, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def route(self, x: Tensor) -> Routing:
        inputs = as_samples(x).to(router_dtype(x))
        outer = router_logits(inputs, self.group_weight)
        outer_spread = router_logits(inputs, self.group_noise_weight)
        inner, inner_spread = router_logits(inputs, self.weight), router_logits(inputs, self.noise_weight)
        groups = choose_noisily(outer, outer_spread, self._draw(outer), self.top_groups)
        noise = self._draw(inner)
        experts = choose_noisily(
            self._by_group(inner),
            self._by_group(inner_spread),
            None if noise is None else self._by_group(noise),
            self.top_experts,
        )
        indices, weights = self._join(groups.indices, groups.weights, experts.indices, experts.weights)
        is_chosen = torch.zeros_like(outer).scatter_(-1, groups.indices, 1.0)[..., None]
        rows = [
            torch.zeros_like(inner).scatter(-1, indices, weights),
            groups.load[..., None].expand_as(experts.load).flatten(-2),
            (experts.load * is_chosen).flatten(-2),
            is_chosen.expand_as(experts.load).flatten(-2),
        ]
        probabilities = (groups.probabilities[..., None] * experts.probabilities).flatten(-2)
        summed = inner + inner_spread + (outer + outer_spread).sum(-1, keepdim=True)  # finite only if all are
        return finish(self, x, Choice(indices, weights, summed, probabilities), rows)

    def _draw(self, like: Tensor) -> Tensor | None:
        if not self.training:
            return None
        assert self.noise is not None
        return self.noise.normal(like.shape, like, self.positions.numbers(like.shape[1]))

    def _by_group(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.groups, self.num_experts // self.groups)

    def _join(
        self, groups: Tensor, group_weights: Tensor, experts: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The experts of the chosen groups [samples, positions, k], and the products of the weights.

        `experts` and `weights` are of all groups, [samples, positions, groups, top_experts].
        """
        of_chosen = groups[..., None].expand(*groups.shape, self.top_experts)
        per_group = self.num_experts // self.groups
        indices = groups[..., None] * per_group + experts.gather(-2, of_chosen)
        products = group_weights[..., None] * weights.gather(-2, of_chosen)
        return indices.flatten(-2), products.flatten(-2)

    @property
    def has_loss(self) -> bool:
        return self.importance > 0 or self.load > 0

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        _, _, _, importance, group_load, load, group_tokens = statistics
        load = group_load * load / group_tokens.clamp_min(1.0)
        loss: Tensor = self.importance * cv_squared(importance) + self.load * cv_squared(load)
        return loss


def _level_errors(groups: int, experts_per_group: int, top_groups: int, top_experts: int) -> Iterator[str]:
    if not 1 <= top_groups <= max(groups, 1):
        yield f"top_groups={top_groups}: must be from 1 to groups={groups}"
    if not 1 <= top_experts <= max(experts_per_group, 1):
        yield f"top_experts={top_experts}: must be from 1 to experts_per_group={experts_per_group}"
