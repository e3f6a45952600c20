"""Gates that score experts by softmax(x·Wᵀ): the k largest, Switch, GShard, and expert choice."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.nn.autograd.second_run import once
from echelon.nn.dropout.mask import KeyedNoise
from echelon.nn.dropout.training_position import check_samples
from echelon.nn.experts.gate import (
    Gate,
    Routing,
    as_samples,
    normalize_errors,
    router_dtype,
    size_errors,
    weight_errors,
)
from echelon.nn.experts.routing import (
    Choice,
    capacity_of,
    finish,
    router_logits,
    switch_balance,
    top_softmax,
    z_row,
)

_SCORE_STEPS = 2**20  # in which scores from 0 to 1 are told apart


class SoftmaxRouter(Gate):
    """The base of gates that choose by a softmax over all experts; subclasses choose in `_choose`."""

    rows: ClassVar[tuple[str, ...]] = (*Gate.rows, "probability", "z")
    balanced_row: ClassVar[str] = "tokens"  # the choices that the balancing loss makes equal

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
        errors: Iterable[str] = (),
    ) -> None:
        errors = [
            *size_errors(width=width),
            *normalize_errors(top_k, normalize),
            *weight_errors(balance=balance, z_loss=z_loss, jitter=jitter),
            *errors,
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
        probabilities, indices, weights, rows = self._choose(logits)
        choice = Choice(indices, weights, logits, probabilities)
        return finish(self, x, choice, [probabilities, z_row(logits, self.z_loss), *rows])

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
        """Return probabilities, the experts of each token, their weights, and further rows of statistics."""
        return *top_softmax(logits, self.top_k, normalize=self.normalize), ()

    def _jittered(self, x: Tensor) -> Tensor:
        """In training, multiply each input of the router by a number from 1 − jitter to 1 + jitter."""
        if self.jitter == 0 or not self.training:
            return x
        x = x.to(router_dtype(x))
        return x * (1 + self.jitter * (2 * self._uniform(x) - 1))

    def _uniform(self, like: Tensor) -> Tensor:
        assert self.noise is not None
        return self.noise.uniform(like.shape, like, self.positions.numbers(like.shape[1]))

    @property
    def has_loss(self) -> bool:
        return self.balance > 0 or self.z_loss > 0

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        rows = dict(zip(self.rows, statistics, strict=True))
        num_tokens = self.num_tokens(statistics)
        balance = switch_balance(rows[self.balanced_row], rows["probability"], num_tokens)
        loss: Tensor = self.balance * balance + self.z_loss * rows["z"].sum() / num_tokens
        return loss


@final
class SoftmaxGate(SoftmaxRouter):
    """G = softmax(x·Wᵀ), of which the k largest stay (Mixtral, Qwen-MoE, DeepSeek-MoE).

    The weights sum to 1 if `normalize`. In float32 at least. `balance` weighs the loss E · Σ_i f_i · P_i: f_i
    is the fraction of slots of expert i, P_i its mean probability. `z_loss` weighs the mean of
    (log Σ exp logits)², which keeps logits small. `jitter`: in training, the inputs of the gate are
    multiplied by random numbers from 1 − jitter to 1 + jitter.
    """


@final
class SwitchGate(SoftmaxRouter):
    """Each token takes the expert of the largest probability, weighed by it. In float32 at least.

    The paper has capacity=1.25 and jitter=0.01. See `SoftmaxGate` for these and the losses.
    """

    def __init__(
        self,
        width: int,
        num_experts: int,
        *,
        balance: float = 0.01,
        z_loss: float = 0.0,
        capacity: float | None = None,
        jitter: float = 0.0,
    ) -> None:
        super().__init__(
            width,
            num_experts,
            1,
            normalize=False,
            balance=balance,
            z_loss=z_loss,
            capacity=capacity,
            jitter=jitter,
        )


@final
class GShardGate(SoftmaxRouter):
    """The two largest of softmax(x·Wᵀ), g₁ and g₂, normalized to g₁ + g₂ = 1. In float32 at least.

    In training the second expert is used with probability 2·g₂: where it counts little, a token takes one
    expert. In evaluation it is always used. `balance` weighs the loss E · Σ_i f_i · P_i, where f_i is the
    fraction of tokens whose first choice is i, and P_i the mean probability of i (the paper's, times E²).
    The paper has capacity=1.
    """

    rows: ClassVar[tuple[str, ...]] = (*SoftmaxRouter.rows, "first")
    balanced_row: ClassVar[str] = "first"

    def __init__(
        self,
        width: int,
        num_experts: int,
        *,
        balance: float = 0.01,
        z_loss: float = 0.0,
        capacity: float | None = None,
    ) -> None:
        super().__init__(width, num_experts, 2, balance=balance, z_loss=z_loss, capacity=capacity)
        self.noise = KeyedNoise()

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
        probabilities, indices, weights, _ = super()._choose(logits)
        first_choice, second = indices.split(1, -1)
        first = torch.zeros_like(probabilities).scatter_(-1, first_choice, 1.0)
        if self.training:
            second = second.masked_fill(~self._uses_second(weights[..., 1:].detach()), self.num_experts)
            indices = torch.cat([first_choice, second], -1)
        return probabilities, indices, weights, [first]

    def _uses_second(self, weight: Tensor) -> Tensor:
        return 2 * weight > self._uniform(weight)

    def num_tokens(self, statistics: Tensor) -> Tensor:
        return statistics[self.rows.index("first")].sum()  # a second choice may be left out


@final
class ExpertChoiceGate(SoftmaxRouter):
    """Each expert takes those C tokens of each sample to which softmax(x·Wᵀ) gives it the most weight.

    C = `chosen_per_token` · positions / num_experts, rounded up: so many experts a token has on average. A
    token may have any number of experts, also none: a routing has a column for every expert. No expert has
    more tokens than another, and no loss is needed (Zhou et al., 2022).

    Not for causal language models: which experts a token has depends on tokens behind it, which a model that
    generates text does not have yet; in training it could learn to look ahead. For encoders and images.
    """

    def __init__(
        self, width: int, num_experts: int, *, chosen_per_token: float = 2.0, z_loss: float = 0.0
    ) -> None:
        errors = []
        if not 0 < chosen_per_token <= num_experts:
            errors.append(
                f"chosen_per_token={chosen_per_token}: must be above 0 and at most num_experts={num_experts}"
            )
        super().__init__(width, num_experts, num_experts, normalize=False, z_loss=z_loss, errors=errors)
        self.chosen_per_token = chosen_per_token

    def route(self, x: Tensor) -> Routing:
        if x.ndim < 3:
            raise UserError(
                f"ExpertChoiceGate: experts choose among the positions of a sample, and the input "
                f"{list(x.shape)} has none; give it [samples, positions, width]"
            )
        check_samples("ExpertChoiceGate: the choice of experts", x.shape)
        return super().route(x)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
        probabilities = logits.softmax(-1)
        # Ranks that share the sequence gather all scores: only the first of two runs may do that.
        is_chosen = once(partial(self._choose_tokens, probabilities.detach()))
        experts = torch.arange(self.num_experts, device=probabilities.device).expand_as(probabilities)
        return probabilities, experts.masked_fill(~is_chosen, self.num_experts), probabilities, ()

    def _choose_tokens(self, scores: Tensor) -> Tensor:
        """Return which experts take which tokens, [samples, positions, experts]."""
        length = scores.shape[1]
        is_true = self.positions.is_true(length)
        if is_true is not None:
            scores = scores.masked_fill(~is_true[:, None], -1.0)
        whole = self.positions.gather(scores)
        positions = self.positions.whole_length(length)
        count = min(positions, capacity_of(self.chosen_per_token, positions, 1, self.num_experts))
        # A sample that begins with the same token twice has two equal positions, whose scores differ by
        # rounding alone: the earlier one comes first.
        best = (whole * _SCORE_STEPS).round().sort(dim=1, descending=True, stable=True).indices[:, :count]
        is_chosen = torch.zeros_like(whole, dtype=torch.bool).scatter_(1, best, True)
        return self.positions.here(is_chosen, length)

    def num_tokens(self, statistics: Tensor) -> Tensor:
        return statistics[self.rows.index("probability")].detach().sum()  # 1 for each
