"""GPT and Llama: lists of layers, each taking what the one before returned; their loss, and text from them.

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

from echelon.errors import UserError, raise_errors
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
from echelon.models.hf.dialects import hf_layout
from echelon.nn.head.deferred import fused_cross_entropy
from echelon.nn.losses import IGNORED_TARGET
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


def cross_entropy(output: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross entropy of logits [..., vocab] against targets [...], and how many targets counted.

    The engine divides: only it knows how many tokens all microbatches and replicas counted together.

    `output` is the logits, or has them as `.logits`, like the output of a transformers model.
    Targets are the tokens to predict at each position (already shifted by the data); a target of -100 is left
    out of both numbers. Computed in float32 at least.

        total, count = cross_entropy(model(tokens), targets)
    """
    logits: Tensor = getattr(output, "logits", output)
    _check_targets(logits, targets)
    total = fused_cross_entropy(logits, targets)
    if total is None:
        upcast = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
        total = F.cross_entropy(upcast, targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")
    return total, (targets != IGNORED_TARGET).sum()


def _check_targets(logits: Tensor, targets: Tensor) -> None:
    errors = []
    if logits.shape[:-1] != targets.shape or targets.ndim == 0:
        errors.append(
            f"logits are {list(logits.shape)}, targets {list(targets.shape)}: targets must have the shape of "
            "logits without the last dim"
        )
    if targets.dtype != torch.int64:
        errors.append(f"targets are {targets.dtype}: token ids must be torch.int64; call targets.long()")
    raise_errors("cross_entropy", errors)


@torch.no_grad()
def generate(
    model: Transformer,
    prompt_tokens: Tensor,
    length: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    end: int | None = None,
) -> Tensor:
    """Return the prompt, [sequence] or [batch, sequence], followed by `length` sampled tokens.

    To look at what a training has learned, not to serve: there is no cache of keys and values.

    Each token is drawn from the `top_k` likeliest (None: from all), with probabilities sharpened by a
    `temperature` below 1; 0 always takes the likeliest. The same seed gives the same tokens and torch's
    global seed is not touched. The model sees the last `config.sequence` tokens. A row that has drawn `end`
    is over and filled up with it; when all are, fewer tokens are returned.
    """
    _check_request(model, prompt_tokens, length, temperature, top_k)
    tokens = prompt_tokens if prompt_tokens.ndim == 2 else prompt_tokens[None]
    dice = torch.Generator().manual_seed(seed)
    was_training = model.training
    is_over = torch.zeros(len(tokens), 1, dtype=torch.bool)
    model.eval()
    try:
        for _ in range(length):
            logits = model(tokens[:, -model.config.sequence :])[:, -1]
            # Drawn on the CPU, whose generator gives the same numbers beside every kind of device.
            drawn = _draw(logits.cpu(), temperature, top_k, dice)
            if end is not None:
                drawn = drawn.masked_fill(is_over, end)
                is_over |= drawn == end
            tokens = torch.cat([tokens, drawn.to(tokens.device)], dim=1)
            if bool(is_over.all()):
                break
    finally:
        model.train(was_training)
    return tokens if prompt_tokens.ndim == 2 else tokens[0]


def _draw(logits: Tensor, temperature: float, top_k: int | None, dice: torch.Generator) -> Tensor:
    """Draw one token for each row of logits [batch, vocab], as [batch, 1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    likeliest, tokens = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    scores = likeliest.to(torch.promote_types(likeliest.dtype, torch.float32))
    return tokens.gather(-1, torch.multinomial((scores / temperature).softmax(dim=-1), 1, generator=dice))


def _check_request(
    model: Transformer, prompt: Tensor, length: int, temperature: float, top_k: int | None
) -> None:
    errors = []
    vocab = model.config.vocab
    if prompt.dtype not in (torch.int32, torch.int64):
        errors.append(f"prompt_tokens are {prompt.dtype}: must be token ids, torch.int64")
    if prompt.ndim not in (1, 2) or prompt.numel() == 0:
        errors.append(
            f"prompt_tokens have shape {list(prompt.shape)}: must be [sequence] or [batch, sequence], "
            "with at least one token"
        )
    elif prompt.min() < 0 or prompt.max() >= vocab:
        errors.append(
            f"prompt_tokens hold ids from {int(prompt.min())} to {int(prompt.max())}: the vocabulary of this "
            f"model is 0 to {vocab - 1}"
        )
    if length < 0:
        errors.append(f"length={length}: must be 0 or more")
    if not temperature >= 0:
        errors.append(f"temperature={temperature}: must be 0 (always the likeliest token) or more")
    if top_k is not None and top_k < 1:
        errors.append(f"top_k={top_k}: must be at least 1, or None to draw from all tokens")
    raise_errors("generate", errors)
