"""The Llama family (Mixtral, Qwen3): rotary positions, RMSNorm, SwiGLU, grouped key/value heads, no bias."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.models.blocks import Attention, Block, Linear, TokenEmbedding, residual_std
from echelon.models.config import ModelConfig
from echelon.models.mixture import feed_forward
from echelon.models.rotary import Rotary
from echelon.models.transformer import Transformer


class Llama(Transformer):
    """Llama(preset("llama3-8b"))"""

    def __init__(self, config: ModelConfig) -> None:
        if config.family != "llama":
            raise UserError(
                f"Llama cannot be built from a config of family '{config.family}'; use build(config)"
            )
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
