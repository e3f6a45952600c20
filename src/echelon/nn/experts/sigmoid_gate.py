"""The gate of DeepSeek-V3: sigmoid scores, choices limited to a few groups, balanced by a bias."""

from collections.abc import Callable
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from echelon.nn.experts.gate import (
    Gate,
    Routing,
    as_samples,
    group_errors,
    normalize_errors,
    size_errors,
    weight_errors,
)
from echelon.nn.experts.routing import Choice, finish, largest, router_logits


@final
class SigmoidGate(Gate):
    """The k largest of sigmoid(x·Wᵀ) + bias; their weights are the scores without the bias.

    The weights are normalized to sum 1 if `normalize`, and multiplied by `scale`. Of `groups` equal groups,
    only experts of the `top_groups` best can be chosen; a group is as good as its two best experts together.

    No loss: after each step, the bias of an expert that had more than the mean falls by `bias_rate`, and that
    of one that had less rises. Names are those of transformers. In float32 at least, and so is the bias, also
    in a model of bf16: what it changes by would be lost there.
    """

    rows: ClassVar[tuple[str, ...]] = Gate.rows
    e_score_correction_bias: Tensor

    def __init__(
        self,
        width: int,
        num_experts: int,
        top_k: int,
        *,
        groups: int = 1,
        top_groups: int | None = None,
        normalize: bool = True,
        scale: float = 1.0,
        bias_rate: float = 0.001,
        capacity: float | None = None,
    ) -> None:
        top_groups = groups if top_groups is None else top_groups
        errors = [
            *size_errors(width=width),
            *group_errors(num_experts, groups, top_groups, min(top_k, num_experts)),
            *normalize_errors(top_k, normalize),
            *weight_errors(scale=scale, bias_rate=bias_rate),
        ]
        super().__init__(num_experts, top_k, capacity, errors)
        self.groups, self.top_groups = groups, top_groups
        self.normalize, self.scale, self.bias_rate = normalize, scale, bias_rate
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.register_buffer("e_score_correction_bias", torch.empty(num_experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.e_score_correction_bias)

    def route(self, x: Tensor) -> Routing:
        logits = router_logits(as_samples(x), self.weight)
        scores = logits.sigmoid()
        indices = largest(self._allowed(scores.detach() + self.e_score_correction_bias), self.top_k)
        weights = scores.gather(-1, indices)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        probabilities = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        return finish(self, x, Choice(indices, weights * self.scale, logits, probabilities))

    def _allowed(self, scores: Tensor) -> Tensor:
        """−∞ for experts outside of the best groups."""
        if self.top_groups == self.groups:
            return scores
        by_group = scores.unflatten(-1, (self.groups, -1))
        best = by_group.topk(min(2, by_group.shape[-1])).values.sum(-1)
        is_allowed = torch.zeros_like(best, dtype=torch.bool)
        is_allowed.scatter_(-1, largest(best, self.top_groups), True)
        allowed: Tensor = by_group.masked_fill(~is_allowed[..., None], -torch.inf).flatten(-2)
        return allowed

    @torch.no_grad()
    def after_step(self, statistics: Tensor) -> None:
        tokens = statistics[0]
        self.e_score_correction_bias += self.bias_rate * (tokens.mean() - tokens).sign()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Convert the module, but move the bias without rounding it."""
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.e_score_correction_bias
        if after.dtype.itemsize < 4:
            self.e_score_correction_bias = before.to(
                after.device, torch.promote_types(before.dtype, torch.float32)
            )
        return self
