"""Balancing losses, of sums over the global batch."""

import torch
from torch import Tensor

_EPSILON = 1e-10  # for sums that are all 0


def cv_squared(sums: Tensor) -> Tensor:
    """The squared coefficient of variation, Var / Mean²: 0 if all experts have the same."""
    return sums.var(correction=0) / (sums.mean().square() + _EPSILON)


def switch_balance(chosen: Tensor, probability: Tensor, num_tokens: Tensor) -> Tensor:
    """E · Σ_i f_i · P_i: f_i is the fraction of choices of expert i, P_i its mean probability.

    1 if both are uniform, E if one expert has all. Gradients go through P, because f has none.
    """
    fractions, means = chosen / chosen.sum(), probability / num_tokens
    return len(chosen) * (fractions * means).sum()


def z_row(logits: Tensor) -> Tensor:
    """What the router z-loss needs of each token, (log Σ exp logits)², the same part in each column."""
    num_experts = logits.shape[-1]
    return (logits.logsumexp(-1, keepdim=True).square() / num_experts).expand_as(logits)


def no_row(logits: Tensor) -> Tensor:
    """A row of zeros, where no loss needs it."""
    return torch.zeros_like(logits[..., :1]).expand_as(logits)
