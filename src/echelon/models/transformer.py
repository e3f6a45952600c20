"""What every family shares: a list of layers, each taking what the one before returned.

A family (`gpt`, `llama`) only says which parts to connect.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from echelon.models.blocks import Block, Head, TokenEmbedding, reset_parameters
from echelon.models.config import ModelConfig


class Transformer(nn.Module):
    """Base of the families: token embedding, blocks, head. `config` has its sizes."""

    def __init__(
        self, config: ModelConfig, embedding: TokenEmbedding, blocks: Iterable[Block], norm: nn.Module
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.blocks = nn.ModuleList(blocks)
        self.head = Head(config, norm, tied=embedding.tokens.weight if config.tied else None)

    def layers(self) -> list[nn.Module]:
        """Embedding, block 0 … L-1, head: where a pipeline may split. One tensor passes between layers."""
        return [self.embedding, *self.blocks, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, sequence] to logits [batch, sequence, vocab]."""
        x = tokens
        for layer in self.layers():
            x = layer(x)
        return x

    def tie(self) -> None:
        """Make head and embedding share one parameter again, where the config says so.

        `to_empty` and `load_state_dict(assign=True)` give each its own.
        """
        if self.config.tied:
            self.head.projection.weight = self.embedding.tokens.weight

    def reset_parameters(self) -> None:
        """Initial values for the whole model, for example after `to_empty`; same seed, same values."""
        self.tie()
        for layer in self.layers():
            reset_parameters(layer)
