"""The arguments of decoder layers whose attention has biases by distance (Bloom, Falcon).

A model's forward computes them once for all layers, and so does each layer here. They have all heads: under
tensor parallelism attention takes those of its rank.
"""

import math
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.nn.huggingface.inputs import MASK
from echelon.nn.huggingface.layers import LayerInputs, padded, positions_of
from echelon.nn.sequence import View


class BloomInputs(LayerInputs):
    """Biases and a mask; no positions."""

    masks_take_positions = False

    def arguments(self, x: Tensor, view: View) -> dict[str, Any]:
        refuse_shared(self.config, view)
        biases = _biases("bloom", x, self.config.n_head, view)
        return {
            "alibi": biases,
            "attention_mask": self._mask(x, view),
            "layer_past": None,
            "use_cache": False,
        }


class FalconInputs(LayerInputs):
    """Biases that are a part of the mask, or rotary positions."""

    masks_take_positions = False

    def arguments(self, x: Tensor, view: View) -> dict[str, Any]:
        refuse_shared(self.config, view)
        common = {"layer_past": None, "use_cache": False}
        if self.config.alibi:
            biases = _biases("falcon", x, self.config.num_attention_heads, view)
            biases = biases.reshape(x.shape[0], -1, *biases.shape[1:])
            return common | {"alibi": biases, "attention_mask": self._biased_mask(x, view, biases)}
        positions = positions_of(view, x.shape[1] * view.stretch, x.device)
        rotated = self.rotary(x, position_ids=positions)
        mask = self._mask(x, view, allow_is_causal_skip=False)
        return common | {"alibi": None, "attention_mask": mask, "position_embeddings": rotated}

    def _biased_mask(self, x: Tensor, view: View, biases: Tensor) -> Tensor:
        mask, lowest = self._mask(x, view, allow_is_causal_skip=False), torch.finfo(x.dtype).min
        is_hidden = ~mask if mask.dtype == torch.bool else mask < -1
        width = self.config.hidden_size // self.config.num_attention_heads
        return torch.masked_fill(biases / math.sqrt(width), is_hidden, lowest)


def refuse_shared(config: Any, view: View) -> None:
    if view.parts > 1:
        raise UserError(
            f"{type(config).__name__} with its sequence over {view.parts} ranks: its attention computes all "
            "scores itself, and cannot ask other ranks for keys; use context=1"
        )


def _biases(family: str, x: Tensor, heads: int, view: View) -> Tensor:
    """[batch · heads, 1, keys], as transformers computes them."""
    modeling = import_module(f"transformers.models.{family}.modeling_{family}")
    length = x.shape[1] * view.stretch
    keys = torch.ones(x.shape[0], length, dtype=torch.int64, device=x.device)
    if MASK in view.shared:  # padding is at no distance
        keys = padded(view.shared[MASK], length)
    biases: Tensor = modeling.build_alibi_tensor(keys, heads, dtype=x.dtype)
    return biases
