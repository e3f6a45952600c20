"""What every family shares: a list of layers, each taking what the one before returned.

A family (`gpt`, `llama`) only says which parts to connect.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from echelon.models.blocks import Block, Head, TokenEmbedding, reset_parameters
from echelon.models.config import ModelConfig
from echelon.models.hf.config import config_differences, config_to_hf
from echelon.models.hf.names import hf_layout
from echelon.state.weight_files import WeightLayout


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

    def weight_layout(
        self, names: Collection[str] = (), state: Mapping[str, Tensor] | None = None
    ) -> WeightLayout:
        """How Hugging Face files hold the weights: files with these names, or those to write."""
        return hf_layout(self.config, self.state_dict() if state is None else state, names)

    def config_json(self, dtype: torch.dtype) -> dict[str, Any]:
        """The config.json of Hugging Face files with weights of this type."""
        return config_to_hf(self.config, str(dtype).removeprefix("torch."))

    def config_errors(self, raw: Mapping[str, Any]) -> list[str]:
        """Why weights with this config.json are not those of this model."""
        return config_differences(self.config, raw)

    def reset_parameters(self) -> None:
        """Initial values for the whole model, for example after `to_empty`; same seed, same values."""
        self.tie()
        for layer in self.layers():
            reset_parameters(layer)
