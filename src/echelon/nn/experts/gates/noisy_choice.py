"""Noisy top-k: the choice of experts by noisy logits, and the probability that it falls on each of them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.nn.experts.gates.choice import largest

# A quotient by less would not be finite in float32. softplus(x) is below it for x < −13.8.
_SMALLEST_DEVIATION = 1e-6


class NoisyChoice(NamedTuple):
    """For tokens [samples, positions, …]."""

    indices: Tensor  # [… , k]
    weights: Tensor  # [… , k]: softmax of the k largest noisy logits
    probabilities: Tensor  # [… , experts]: softmax of all of them
    load: Tensor  # [… , experts]: P(x, i), with which i would be among the k if its noise were drawn again


def choose_noisily(clean: Tensor, spread: Tensor, noise: Tensor | None, top_k: int) -> NoisyChoice:
    """The k largest of H = clean + noise · softplus(spread); without noise, of `clean`."""
    deviation = F.softplus(spread)
    noisy = clean if noise is None else clean + noise * deviation
    order = largest(noisy, top_k + 1)
    indices = order[..., :top_k]
    weights = noisy.gather(-1, indices).softmax(-1)
    chosen = torch.zeros_like(noisy).scatter_(-1, indices, 1.0)
    load = chosen
    if noise is not None:
        load = _load(clean, noisy, deviation, order, chosen) if top_k < noisy.shape[-1] else chosen
    return NoisyChoice(indices, weights, noisy.softmax(-1), load)


def _load(clean: Tensor, noisy: Tensor, deviation: Tensor, order: Tensor, chosen: Tensor) -> Tensor:
    """P(x, i) = Φ((clean_i − kth_excluding(H, k, i)) / deviation_i)."""
    last, next_one = noisy.gather(-1, order[..., -2:]).split(1, -1)  # the k-th and the (k+1)-th largest
    kth_excluding = torch.where(chosen > 0, next_one, last)
    distance = (clean - kth_excluding) / deviation.clamp_min(_SMALLEST_DEVIATION)
    load: Tensor = torch.special.ndtr(distance)
    return load
