"""What a layer sees of the sequence. Layers ask their `view`, so that a sequence can be spread over ranks.

A layer that needs positions, or mixes them (attention), has an attribute `view`, which is `WHOLE` unless
somebody assigns another one: context parallelism does.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class View:
    """All positions are here, in order. Others know better (`context_parallel`)."""

    parts = 1  # ranks that share the sequence, each with as many positions
    stretch = 1  # attention sees so many times the positions of the hidden states between layers

    def positions(self, length: int, device: torch.device) -> Tensor:
        """The places in the whole sequence of the `length` positions that are here, [length]."""
        return torch.arange(length, device=device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """Causal attention over the whole sequence, for the queries that are here.

        [batch, heads, sequence, head_width] each; keys and values may have fewer heads.
        """
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )


WHOLE = View()


def assign(model: nn.Module, view: View) -> int:
    """Let every layer of `model` that asks for one have this view; returns how many do."""
    asking = [module for module in model.modules() if isinstance(getattr(module, "view", None), View)]
    for module in asking:
        setattr(module, "view", view)  # noqa: B010 (which a module does not declare)
    return len(asking)
