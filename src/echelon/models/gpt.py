"""The GPT family (GPT-2, GPT-3): learned positions, LayerNorm, GELU, biases everywhere.

Dropout is where GPT-2 has it, except on attention weights: fused kernels do not expose them.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.models.blocks import Attention, Block, Embedding, Linear, TokenEmbedding, residual_std
from echelon.models.config import ModelConfig
from echelon.models.mixture import feed_forward
from echelon.models.transformer import Transformer
from echelon.nn.sequence import WHOLE


class GPT(Transformer):
    """GPT(preset("gpt-small"))"""

    def __init__(self, config: ModelConfig) -> None:
        if config.family != "gpt":
            raise UserError(
                f"GPT cannot be built from a config of family '{config.family}'; use build(config)"
            )
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

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.view.positions(tokens.shape[1], tokens.device)
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
