"""GPT and Llama: lists of layers, each taking what the one before returned.

A family only says which parts of `blocks` to connect. GPT (GPT-2, GPT-3) has learned positions, LayerNorm,
GELU and biases everywhere; dropout is where GPT-2 has it, except on attention weights, which fused kernels do
not expose. Llama (Mixtral, Qwen3) has rotary positions, RMSNorm, SwiGLU, grouped key/value heads and no bias.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.models.blocks import (
    Attention,
    Block,
    Embedding,
    Head,
    Linear,
    Rotary,
    TokenEmbedding,
    feed_forward,
    reset_parameters,
    residual_std,
)
from echelon.models.config import Family, ModelConfig
from echelon.models.hf.config import config_differences, config_to_hf
from echelon.models.hf.names import hf_layout
from echelon.nn.sequence import POSITIONS, WHOLE
from echelon.state.weight_files.layout import WeightLayout


class Transformer(nn.Module):
    """Base of the families: token embedding, blocks, head. `config` has its sizes."""

    shared_inputs = (POSITIONS,)  # arguments that every layer may ask its view for

    def __init__(
        self, config: ModelConfig, embedding: TokenEmbedding, blocks: Iterable[Block], norm: nn.Module
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.blocks = nn.ModuleList(blocks)
        self.head = Head(config, norm, tied=embedding.tokens.weight if config.tied else None)

    @classmethod
    def _check_family(cls, config: ModelConfig, family: Family) -> None:
        if config.family != family:
            raise UserError(
                f"{cls.__name__} cannot be built from a config of family '{config.family}'; use build(config)"
            )

    def layers(self) -> list[nn.Module]:
        """Embedding, block 0 … L-1, head: where a pipeline may split. One tensor passes between layers."""
        return [self.embedding, *self.blocks, self.head]

    def forward(self, tokens: Tensor, *, position_ids: Tensor | None = None) -> Tensor:
        """Tokens [batch, sequence] to logits [batch, sequence, vocab].

        `position_ids`, of the same shape: where they start again, another document begins, and tokens attend
        to those of their own document alone.
        """
        packed = {} if position_ids is None else {POSITIONS: position_ids}
        x: Tensor = self.embedding(tokens, **packed)
        for block in self.blocks:
            x = block(x, **packed)
        logits: Tensor = self.head(x)
        return logits

    def tie(self) -> None:
        """Make head and embedding share one parameter again, where the config says so.

        `to_empty` and `load_state_dict(assign=True)` give each its own.
        """
        if self.config.tied:
            self.head.projection.weight = self.embedding.tokens.weight

    def weight_layout(
        self, names: Collection[str] = (), state: Mapping[str, Tensor] | None = None
    ) -> WeightLayout:
        """Return how Hugging Face files hold the weights: files with these names, or those to write."""
        return hf_layout(self.config, self.state_dict() if state is None else state, names)

    def config_json(self, dtype: torch.dtype) -> dict[str, Any]:
        """Write the config.json of Hugging Face files with weights of this type."""
        return config_to_hf(self.config, str(dtype).removeprefix("torch."))

    def config_errors(self, raw: Mapping[str, Any]) -> list[str]:
        """List why weights with this config.json are not those of this model."""
        return config_differences(self.config, raw)

    def reset_parameters(self) -> None:
        """Draw initial values for the whole model, for example after `to_empty`; same seed, same values."""
        self.tie()
        for layer in self.layers():
            reset_parameters(layer)


class GPT(Transformer):
    """GPT-2: `GPT(preset("gpt-small"))`."""

    def __init__(self, config: ModelConfig) -> None:
        self._check_family(config, "gpt")
        norm = partial(nn.LayerNorm, config.width, eps=config.norm_epsilon)
        super().__init__(
            config,
            PositionedEmbedding(config),
            (
                Block(Attention(config, rotary=None), feed_forward(config, layer, MLP), norm, config.dropout)
                for layer in range(config.layers)
            ),
            norm(),
        )


class PositionedEmbedding(TokenEmbedding):
    """Token embedding plus a learned vector for each position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.positions = Embedding(config.sequence, config.width)
        self.view = WHOLE

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        packed = position_ids if position_ids is not None else self.view.packed_positions(tokens.shape[1])
        places = self.view.positions(tokens.shape[1], tokens.device) if packed is None else packed
        length, learned = self.view.whole_length(tokens.shape[1]), self.positions.num_embeddings
        if length > learned:
            raise UserError(
                f"a sequence of {length} tokens: this GPT has learned {learned} positions; "
                f"give it at most {learned} tokens, or build it with sequence={length}"
            )
        x: Tensor = self.dropout(self.tokens(tokens) + self.positions(places))
        return x


class MLP(nn.Module):
    """Feed-forward: up, GELU (the tanh form, as GPT-2 was trained), down."""

    def __init__(self, config: ModelConfig, ffn: int) -> None:
        super().__init__()
        self.up = Linear(config.width, ffn, config.bias)
        self.down = Linear(ffn, config.width, config.bias, std=residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x), approximate="tanh")
        down: Tensor = self.down(hidden)
        return down


class Llama(Transformer):
    """Llama and its kin: `Llama(preset("llama3-8b"))`."""

    def __init__(self, config: ModelConfig) -> None:
        self._check_family(config, "llama")
        # nn.RMSNorm sums in float32 when given bfloat16 or float16, and stays in float64 when given that.
        norm = partial(nn.RMSNorm, config.width, eps=config.norm_epsilon)
        rotary = Rotary.of(config)
        super().__init__(
            config,
            TokenEmbedding(config),
            (
                Block(Attention(config, rotary), feed_forward(config, layer, SwiGLU), norm, config.dropout)
                for layer in range(config.layers)
            ),
            norm(),
        )


class SwiGLU(nn.Module):
    """Feed-forward whose hidden part is gated: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig, ffn: int) -> None:
        super().__init__()
        self.gate = Linear(config.width, ffn, config.bias)
        self.up = Linear(config.width, ffn, config.bias)
        self.down = Linear(ffn, config.width, config.bias, std=residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate(x)) * self.up(x)
        down: Tensor = self.down(hidden)
        return down
