"""Noisy top-k gating (Shazeer et al., 2017), with losses of importance and load; on one level or on two."""

from collections.abc import Iterable, Iterator
from typing import ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.nn.dropout.mask import KeyedNoise
from echelon.nn.experts.gate import Gate, Routing, as_samples, router_dtype, size_errors, weight_errors
from echelon.nn.experts.routing import Choice, cv_squared, finish, largest, router_logits, z_row

# A quotient by less would not be finite in float32. softplus(x) is below it for x < −13.8.
_SMALLEST_DEVIATION = 1e-6


class NoisyChoice(NamedTuple):
    """The experts of tokens [samples, positions, …], and how likely each expert was."""

    indices: Tensor  # [… , k]
    weights: Tensor  # [… , k]: softmax of the k largest noisy logits
    probabilities: Tensor  # [… , experts]: softmax of all of them
    load: Tensor  # [… , experts]: P(x, i), with which i would be among the k if its noise were drawn again


def choose_noisily(clean: Tensor, spread: Tensor, noise: Tensor | None, top_k: int) -> NoisyChoice:
    """Choose the k largest of H = clean + noise · softplus(spread); without noise, of `clean`."""
    deviation = F.softplus(spread)
    noisy = clean if noise is None else clean + noise * deviation
    order = largest(noisy, top_k + 1)
    indices = order[..., :top_k]
    weights = noisy.gather(-1, indices).softmax(-1)
    chosen = torch.zeros_like(noisy).scatter_(-1, indices, 1.0)
    is_certain = noise is None or top_k == noisy.shape[-1]
    load = chosen if is_certain else _load(clean, noisy, deviation, order, chosen)
    return NoisyChoice(indices, weights, noisy.softmax(-1), load)


def _load(clean: Tensor, noisy: Tensor, deviation: Tensor, order: Tensor, chosen: Tensor) -> Tensor:
    """P(x, i) = Φ((clean_i − kth_excluding(H, k, i)) / deviation_i)."""
    last, next_one = noisy.gather(-1, order[..., -2:]).split(1, -1)  # the k-th and the (k+1)-th largest
    kth_excluding = torch.where(chosen > 0, next_one, last)
    distance = (clean - kth_excluding) / deviation.clamp_min(_SMALLEST_DEVIATION)
    load: Tensor = torch.special.ndtr(distance)
    return load


class NoisyRouter(Gate):
    """The base of gates whose logits have learned noise, with losses of importance and load.

    All matrices start at 0: at first the noise decides.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        capacity: float | None,
        errors: Iterable[str],
        *,
        importance: float,
        load: float,
    ) -> None:
        super().__init__(num_experts, top_k, capacity, errors)
        self.importance, self.load, self.noise = importance, load, KeyedNoise()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def _draw(self, like: Tensor) -> Tensor | None:
        """Draw ε ~ N(0, 1) for the logits `like` in training; in evaluation there is no noise."""
        if not self.training:
            return None
        assert self.noise is not None
        return self.noise.normal(like.shape, like, self.positions.numbers(like.shape[1]))

    def _imbalance(self, importance: Tensor, load: Tensor) -> Tensor:
        return self.importance * cv_squared(importance) + self.load * cv_squared(load)

    @property
    def has_loss(self) -> bool:
        return self.importance > 0 or self.load > 0


@final
class NoisyTopKGate(NoisyRouter):
    """G = softmax(keep-top-k(H)), H_i = (x·W_g)_i + ε · softplus((x·W_noise)_i), ε ~ N(0, 1) in training.

    `importance` weighs CV(Σ_x G(x))², `load` weighs CV(Σ_x P(x, ·))², where P(x, i) is the probability that i
    is among the k largest if its noise alone is drawn again. `z_loss` weighs the mean of (log Σ exp x·W_g)².
    In float32 at least.

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
        super().__init__(num_experts, top_k, capacity, errors, importance=importance, load=load)
        self.z_loss = z_loss
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.noise_weight = nn.Parameter(torch.empty(num_experts, width))
        self.reset_parameters()

    def route(self, x: Tensor) -> Routing:
        inputs = as_samples(x).to(router_dtype(x))
        clean, spread = router_logits(inputs, self.weight), router_logits(inputs, self.noise_weight)
        noisy = choose_noisily(clean, spread, self._draw(clean), self.top_k)
        importance = torch.zeros_like(clean).scatter(-1, noisy.indices, noisy.weights)
        choice = Choice(noisy.indices, noisy.weights, clean + spread, noisy.probabilities)
        return finish(self, x, choice, [importance, noisy.load, z_row(clean, self.z_loss)])

    @property
    def has_loss(self) -> bool:
        return super().has_loss or self.z_loss > 0

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        tokens, _, _, importance, load, z = statistics
        loss: Tensor = self._imbalance(importance, load) + self.z_loss * z.sum() * self.top_k / tokens.sum()
        return loss


@final
class HierarchicalGate(NoisyRouter):
    """Each token takes `top_groups` of `groups` groups, and `top_experts` experts in each of them.

    Both levels are noisy top-k gates (appendix B of the paper); expert j of group i is weighed by
    G(x)_i · G_i(x)_j. It is expert i · experts_per_group + j of all.

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
        num_experts, top_k = (1, 1) if errors else (groups * experts_per_group, top_groups * top_experts)
        super().__init__(num_experts, top_k, capacity, errors, importance=importance, load=load)
        self.groups, self.top_groups, self.top_experts = groups, top_groups, top_experts
        self.group_weight = nn.Parameter(torch.empty(groups, width))
        self.group_noise_weight = nn.Parameter(torch.empty(groups, width))
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.noise_weight = nn.Parameter(torch.empty(num_experts, width))
        self.reset_parameters()

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
        indices, weights = self._join(groups, experts)
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

    def _by_group(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.groups, self.num_experts // self.groups)

    def _join(self, groups: NoisyChoice, experts: NoisyChoice) -> tuple[Tensor, Tensor]:
        """Return the experts of the chosen groups [samples, positions, k], and the products of the weights.

        `experts` has those of all groups, [samples, positions, groups, top_experts].
        """
        chosen = groups.indices[..., None].expand(*groups.indices.shape, self.top_experts)
        indices = chosen * (self.num_experts // self.groups) + experts.indices.gather(-2, chosen)
        products = groups.weights[..., None] * experts.weights.gather(-2, chosen)
        return indices.flatten(-2), products.flatten(-2)

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        _, _, _, importance, group_load, load, group_tokens = statistics
        return self._imbalance(importance, group_load * load / group_tokens.clamp_min(1.0))


def _level_errors(groups: int, experts_per_group: int, top_groups: int, top_experts: int) -> Iterator[str]:
    if not 1 <= top_groups <= max(groups, 1):
        yield f"top_groups={top_groups}: must be from 1 to groups={groups}"
    if not 1 <= top_experts <= max(experts_per_group, 1):
        yield f"top_experts={top_experts}: must be from 1 to experts_per_group={experts_per_group}"
