"""The view of a layer on the sequence. Layers ask their `view`, so that several ranks can share a sequence.

A layer that needs positions, or mixes them (attention), has an attribute `view`. It is `WHOLE` until context
parallelism assigns another one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.wrapping import Wrapping


class View:
    """All positions are on this rank, in order. Subclasses know other layouts (`context_parallel`)."""

    parts = 1  # ranks that share the sequence, each with an equal number of positions
    stretch = 1  # positions inside attention per position of the hidden states between layers

    def positions(self, length: int, device: torch.device) -> Tensor:
        """The positions in the whole sequence of the `length` tokens on this rank, [length]."""
        return torch.arange(length, device=device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """Causal attention of the queries on this rank over the whole sequence.

        [batch, heads, sequence, head_width] each; keys and values may have fewer heads.
        """
        is_grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped
        )


WHOLE = View()


def assign(model: nn.Module, view: View, wrapping: Wrapping) -> int:
    """Give this view to every layer of `model` that has one; returns how many do."""
    layers = [module for module in model.modules() if isinstance(getattr(module, "view", None), View)]
    for layer in layers:
        wrapping.assign(layer, "view", view)
    return len(layers)
