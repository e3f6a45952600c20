"""Rotary positions: each pair of a head's numbers is turned by an angle that grows with the position.

Nothing is stored: the angles are computed where they are used, from the caller's positions. So a part of a
sequence is turned by its true positions, a model built on the meta device has no buffer to restore, and
casting a model to bfloat16 does not round the angles.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.models.config import ModelConfig, RopeScaling


@dataclass(frozen=True)
class Rotary:
    """The angles of one model. A head of width E has E/2 pairs, each with its own frequency."""

    head_width: int
    theta: float
    scaling: RopeScaling | None

    @classmethod
    def of(cls, config: ModelConfig) -> "Rotary":
        return cls(config.head_dim, config.rope_theta, config.rope_scaling)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each [sequence, head_width / 2], for positions [sequence].

        In `dtype`, but at least float32: at position 100000 a bfloat16 angle is meaningless.
        """
        precise = torch.promote_types(dtype, torch.float32)
        exponents = torch.arange(0, self.head_width, 2, device=positions.device).to(precise) / self.head_width
        frequencies = self.theta**-exponents
        if self.scaling is not None:
            frequencies = _stretch(frequencies, self.scaling)
        turns = positions.to(precise)[:, None] * frequencies
        return turns.cos(), turns.sin()


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Keep fast pairs, slow down slow ones by `factor`, and blend between (the Llama 3.1 rule)."""
    turns_in_original = scaling.original_sequence * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns_in_original - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn queries or keys [batch, heads, sequence, E]. Number i of a head pairs with number i + E/2, as in
    Hugging Face files."""
    cos, sin = angles
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)
