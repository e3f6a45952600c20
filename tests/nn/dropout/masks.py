"""The mask of one layer in one step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.nn.dropout.mask import Draw, mask_of
from echelon.nn.hashing import hash_of


def keep_mask(
    seed: int,
    step: int,
    layer: int,
    first_sample: int | Tensor,
    shape: Sequence[int],
    p: float,
    device: torch.device | str = "cpu",
    use: int = 0,
    indices: Tensor | None = None,
    feature_part: tuple[int, int] | None = None,
) -> Tensor:
    """Return `mask_of` one layer in one step. `use` counts the uses of the layer."""
    key = hash_of(seed, step, layer, use)
    return mask_of(Draw(key, first_sample, p, indices, feature_part), shape, device)
