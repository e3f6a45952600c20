"""The layers of a transformers model: what its forward does, cut where one decoder layer follows another.

Each is made for training: no cache, no padding. What a model's forward makes once for all layers (positions,
their cosines and sines, the mask), every layer makes for itself from the shape of what it is given.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from echelon.errors import UserError
from echelon.layering.hf_attention import attending, check_spread
from echelon.sequence import WHOLE, View


class Setting:
    """What a decoder layer needs of the model around it. No module, so that no stage owns the frequencies:
    they are the same constants for all, and stay on every rank."""

    def __init__(self, config: Any, rotary: Any, *, slides: bool) -> None:
        self.config, self.rotary, self.slides = config, rotary, slides

    def arguments(self, x: Tensor, view: View) -> dict[str, Any]:
        """What the model's forward gives a layer beside the hidden states."""
        places = view.positions(x.shape[1] * view.stretch, x.device)[None]
        given: dict[str, Any] = {"position_ids": places, "past_key_values": None, "use_cache": False}
        if self.rotary is not None:
            given["position_embeddings"] = self.rotary(x, position_ids=places)
        spread = view.parts > 1
        return given | ({"view": view} if spread else {"attention_mask": self._mask(x, view)})

    def _mask(self, x: Tensor, view: View) -> Any:
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        make = create_sliding_window_causal_mask if self.slides else create_causal_mask
        seen = x[:, :, :1].repeat(1, view.stretch, 1) if view.stretch > 1 else x  # only its form is looked at
        return make(config=self.config, inputs_embeds=seen, attention_mask=None, past_key_values=None)


class Embedding(nn.Module):
    """Tokens to hidden states: [batch, sequence] to [batch, sequence, width]."""

    def __init__(self, tokens: nn.Module, positions: nn.Embedding | None, dropout: nn.Module | None) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = tokens, positions, dropout
        self.view = WHOLE

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        if self.positions is None or self.dropout is None:
            return x
        length, known = tokens.shape[1] * self.view.parts, self.positions.num_embeddings
        if length > known:
            raise UserError(
                f"a sequence of {length} tokens: this model has learned {known} positions; give it at most "
                f"{known} tokens"
            )
        places = self.view.positions(tokens.shape[1], tokens.device)[None]
        positioned: Tensor = self.dropout(x + self.positions(places))
        return positioned


class Layer(nn.Module):
    """One decoder layer: hidden states to hidden states."""

    def __init__(self, block: nn.Module, setting: Setting) -> None:
        super().__init__()
        self.block, self.setting = block, setting
        self.view = WHOLE

    def forward(self, x: Tensor) -> Tensor:
        config, spread = self.setting.config, self.view.parts > 1
        if spread:
            check_spread(self.block, config, self._window(), x.shape[1], self.view)
        with attending(config) if spread else nullcontext():
            after: Tensor = self.block(x, **self.setting.arguments(x, self.view))
        return after

    def _window(self) -> int | None:
        return self.setting.config.sliding_window if self.setting.slides else None


class Head(nn.Module):
    """Hidden states to what the model returns."""

    def __init__(self, norm: nn.Module, head: nn.Module, output: Callable[..., Any]) -> None:
        super().__init__()
        self.norm, self.head, self.output = norm, head, output

    def forward(self, x: Tensor) -> Any:
        return self.output(logits=self.head(self.norm(x)))
