"""The layers of a transformers model: its forward, divided where one decoder layer follows another.

Layers are made for training: no cache. A model's forward computes some things once for all layers (positions,
their cosines and sines, the mask). Here every layer computes them from the shape of its input, and from the
padding mask and the positions of the batch, if it has any (inputs.py).
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.nn.huggingface.attention import attention_by_view, check_shared_sequence
from echelon.nn.huggingface.inputs import MASK, POSITIONS
from echelon.nn.sequence import WHOLE, View


class LayerInputs:
    """The arguments of a decoder layer beside its hidden states.

    It is no module, so that no stage owns the rotary frequencies: all ranks keep these constants.
    """

    masks_take_positions = True  # positions that start again separate sequences in a row

    def __init__(self, config: Any, rotary: Any, *, has_window: bool, layer_type: str | None = None) -> None:
        """`layer_type`: the kind of layer that rotary positions ask for (Gemma 3)."""
        self.config, self.rotary, self.has_window, self.layer_type = config, rotary, has_window, layer_type

    def arguments(self, x: Tensor, view: View) -> dict[str, Any]:
        positions = positions_of(view, x.shape[1] * view.stretch, x.device)
        arguments: dict[str, Any] = {"position_ids": positions, "past_key_values": None, "use_cache": False}
        if self.rotary is not None:
            kind = {} if self.layer_type is None else {"layer_type": self.layer_type}
            arguments["position_embeddings"] = self.rotary(x, position_ids=positions, **kind)
        if view.parts > 1:
            return arguments | {"view": view}
        return arguments | {"attention_mask": self._mask(x, view)}

    @property
    def window(self) -> int | None:
        return self.config.sliding_window if self.has_window else None

    def _mask(self, x: Tensor, view: View, **options: bool) -> Any:
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        make: Any = create_sliding_window_causal_mask if self.has_window else create_causal_mask
        # Only the shape of `inputs_embeds` counts.
        shaped = x[:, :, :1].repeat(1, view.stretch, 1) if view.stretch > 1 else x
        given: dict[str, Any] = dict(options)
        if (
            POSITIONS in view.shared and self.masks_take_positions
        ):  # several sequences in a row are told apart by them
            given["position_ids"] = padded(view.shared[POSITIONS], shaped.shape[1])
        if MASK in view.shared:  # and there is padding: to look for some would stop the host
            given["allow_is_causal_skip"] = False
        mask = padded(view.shared[MASK], shaped.shape[1]) if MASK in view.shared else None
        return make(
            config=self.config, inputs_embeds=shaped, attention_mask=mask, past_key_values=None, **given
        )


def positions_of(view: View, length: int, device: torch.device) -> Tensor:
    """Those of the batch, or those of the sequence, [1, length]."""
    if POSITIONS in view.shared:
        return padded(view.shared[POSITIONS], length)
    return view.positions(length, device)[None]


def padded(values: Tensor, length: int) -> Tensor:
    """[samples, positions] with the last position repeated, as the hidden states are."""
    missing = length - values.shape[1]
    return values if missing == 0 else torch.cat([values, values[:, -1:].expand(-1, missing)], 1)


class Embedding(nn.Module):
    """Tokens to hidden states: [batch, sequence] to [batch, sequence, width]. `after`: dropout or norm."""

    def __init__(self, tokens: nn.Module, positions: nn.Embedding | None, after: nn.Module | None) -> None:
        super().__init__()
        self.tokens, self.positions, self.after = tokens, positions, after
        self.view = WHOLE

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        if self.positions is not None:
            x = x + self._positions(tokens, self.positions)
        return x if self.after is None else self.after(x)

    def _positions(self, tokens: Tensor, table: nn.Embedding) -> Tensor:
        length, longest = self.view.whole_length(tokens.shape[1]), table.num_embeddings
        if length > longest:
            raise UserError(
                f"a sequence of {length} tokens: this model has learned {longest} positions; use sequences "
                f"of at most {longest} tokens"
            )
        learned: Tensor = table(positions_of(self.view, tokens.shape[1], tokens.device))
        return learned


class DecoderLayer(nn.Module):
    """One decoder layer: hidden states to hidden states."""

    def __init__(self, block: nn.Module, inputs: LayerInputs) -> None:
        super().__init__()
        self.block, self.inputs = block, inputs
        self.view = WHOLE

    def forward(self, x: Tensor) -> Tensor:
        config, is_shared = self.inputs.config, self.view.parts > 1
        if is_shared:
            check_shared_sequence(self.block, config, self.inputs.window, x.shape[1], self.view)
        with attention_by_view(config) if is_shared else nullcontext():
            output = self.block(x, **self.inputs.arguments(x, self.view))
        hidden: Tensor = output[0] if isinstance(output, tuple) else output  # without attention's weights
        return hidden


class Head(nn.Module):
    """Hidden states to what the model returns. `cap`: logits are squeezed into (−cap, cap) by tanh."""

    def __init__(
        self, norm: nn.Module, head: nn.Module, output: Callable[..., Any], cap: float | None = None
    ) -> None:
        super().__init__()
        self.norm, self.head, self.output, self.cap = norm, head, output, cap

    def forward(self, x: Tensor) -> Any:
        logits: Tensor = self.head(self.norm(x))
        return self.output(logits=logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap)


def modules_outside(layer: nn.Module) -> set[nn.Module]:
    """The modules that a layer calls and does not hold: those of rotary positions."""
    rotary = layer.inputs.rotary if isinstance(layer, DecoderLayer) else None
    return set() if rotary is None else set(rotary.modules())
