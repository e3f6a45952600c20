"""The parts that both families are made of: linear layers, attention, the residual block, the head.

Every part knows its own initial values (`reset_parameters`), drawn from torch's seed when it is built.
`x` is always hidden states, [batch, sequence, width].
`transformer` has what differs between families (embedding, norm, dense feed-forward), and connects the parts.

Rotary positions turn each pair of a head's numbers by an angle that grows with the position. Nothing is
stored: a part of a sequence is turned by its true positions, a model built on the meta device has no buffer
to restore, and casting a model to bfloat16 does not round the angles.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from echelon.models.config import GATE_FIELDS, ExpertsConfig, ModelConfig, RopeScaling
from echelon.nn.experts import (
    Experts,
    Gate,
    GShardGate,
    HierarchicalGate,
    MixtureOfExperts,
    NoisyTopKGate,
    SigmoidGate,
    SoftmaxGate,
    SwitchGate,
)
from echelon.nn.experts.layer import Activation
from echelon.nn.sequence import WHOLE


@dataclass(frozen=True)
class Rotary:
    """The angles of one model. A head of width E has E/2 pairs, each with its own frequency."""

    head_width: int
    theta: float
    scaling: RopeScaling | None

    @classmethod
    def of(cls, config: ModelConfig) -> "Rotary":
        return cls(config.head_dim, config.rope_theta, config.rope_scaling)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each [sequence, head_width / 2], for positions [sequence]; both may have samples
        before the sequence.

        In `dtype`, but at least float32: at position 100000 a bfloat16 angle is meaningless.
        """
        precise = torch.promote_types(dtype, torch.float32)
        exponents = torch.arange(0, self.head_width, 2, device=positions.device).to(precise) / self.head_width
        frequencies = self.theta**-exponents
        if (scaling := self.scaling) is not None:
            # Fast pairs are kept, slow ones slowed down by `factor`, others between (the Llama 3.1 rule).
            turns_in_original = scaling.original_sequence * frequencies / (2 * math.pi)
            span = scaling.high_freq_factor - scaling.low_freq_factor
            kept = ((turns_in_original - scaling.low_freq_factor) / span).clamp(0, 1)
            frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
        turns = positions.to(precise)[..., None] * frequencies
        return turns.cos(), turns.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn queries or keys [batch, heads, sequence, E]. Number i of a head pairs with number i + E/2, as in
    Hugging Face files."""
    cos, sin = (each.unsqueeze(-3) for each in angles)  # the same for all heads
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


INIT_STD = 0.02


def residual_std(config: ModelConfig) -> float:
    """Return the spread of projections that add to the residual stream: 2 · layers of them are summed."""
    return INIT_STD / math.sqrt(2 * config.layers)


class Linear(nn.Linear):
    """nn.Linear with GPT-2's initial values: normal weights, zero bias."""

    def __init__(self, inputs: int, outputs: int, bias: bool, std: float = INIT_STD) -> None:
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class TiedLinear(nn.Linear):
    """A projection whose weight is another layer's parameter; that layer gives it its initial values."""

    def __init__(self, weight: Tensor) -> None:
        outputs, inputs = weight.shape
        super().__init__(inputs, outputs, bias=False, device="meta")  # meta: no memory
        self.weight = weight

    def reset_parameters(self) -> None:
        """Do nothing: the owner of the weight initialises it."""


class Embedding(nn.Embedding):
    """nn.Embedding with GPT-2's initial values."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class TokenEmbedding(nn.Module):
    """The first layer: tokens [batch, sequence] to hidden states."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = Embedding(config.vocab, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:  # noqa: ARG002
        x: Tensor = self.dropout(self.tokens(tokens))
        return x


class Attention(nn.Module):
    """Causal self-attention, with grouped key/value heads where the config has fewer of them.

    Query, key and value are three matrices, not one fused matrix: tensor parallelism splits each by heads
    with a plain column split, also when keys and values have fewer heads. For the same reason `forward`
    reads the number of heads from the tensors: a rank that holds a part of the heads runs the same code.
    """

    def __init__(self, config: ModelConfig, rotary: Rotary | None) -> None:
        super().__init__()
        self.head_width = config.head_dim
        self.rotary = rotary
        self.view = WHOLE
        self.query = Linear(config.width, config.query_width, config.bias)
        self.key = Linear(config.width, config.kv_width, config.bias)
        self.value = Linear(config.width, config.kv_width, config.bias)
        self.output = Linear(config.query_width, config.width, config.bias, std=residual_std(config))
        self.query_norm, self.key_norm = (
            nn.RMSNorm(config.head_dim, eps=config.norm_epsilon) if config.qk_norm else None for _ in range(2)
        )

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """`position_ids`: of packed documents, if the view was not told of them."""
        query = self._split_heads(self.query(x))
        key = self._split_heads(self.key(x))
        value = self._split_heads(self.value(x))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        packed = position_ids if position_ids is not None else self.view.packed_positions(query.shape[2])
        if self.rotary is not None:
            positions = self.view.positions(query.shape[2], query.device) if packed is None else packed
            angles = self.rotary.angles(positions, query.dtype)
            query, key = rotate(query, angles), rotate(key, angles)
        if packed is None:
            mixed = self.view.attend(query, key, value)
        else:
            mixed = self.view.attend_packed(query, key, value, packed)
        joined: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return joined

    def _split_heads(self, x: Tensor) -> Tensor:
        """View [batch, sequence, heads · head_width] as [batch, heads, sequence, head_width]."""
        return x.reshape(*x.shape[:-1], -1, self.head_width).transpose(1, 2)


class Block(nn.Module):
    """One transformer layer: attention, then feed-forward, each on a normed copy and added back."""

    def __init__(
        self, attention: Attention, mlp: nn.Module, norm: Callable[[], nn.Module], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.attention_dropout = nn.Dropout(dropout)
        self.mlp_norm = norm()
        self.mlp = mlp
        self.mlp_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        mixed = self.attention(self.attention_norm(x), position_ids=position_ids)
        x = x + self.attention_dropout(mixed)
        after: Tensor = x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))
        return after


class Head(nn.Module):
    """The last layer: final norm, then logits over the vocabulary. `tied` is the embedding's weight."""

    def __init__(self, config: ModelConfig, norm: nn.Module, tied: Tensor | None) -> None:
        super().__init__()
        self.norm = norm
        self.projection: nn.Linear = (
            Linear(config.width, config.vocab, bias=False) if tied is None else TiedLinear(tied)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.projection(self.norm(x))
        return logits


def reset_parameters(layer: nn.Module) -> None:
    """Draw the initial values of every part of `layer`, in the order in which it was built.

    So a layer built on the meta device and then given memory (`layer.to_empty(device=...)`) starts with
    the values that it would have had when built there.
    """
    for module in layer.modules():
        if any(True for _ in module.parameters(recurse=False)):
            reset = getattr(module, "reset_parameters", None)
            assert reset is not None, f"{type(module).__name__} does not know its initial values"
            reset()


Dense = Callable[[ModelConfig, int], nn.Module]  # of a hidden width


def feed_forward(config: ModelConfig, layer: int, dense: Dense) -> nn.Module:
    """Make the feed-forward part of the block `layer`; `dense` makes the family's own."""
    experts = config.experts
    if experts is None or not config.has_experts(layer):
        return dense(config, config.ffn_width)
    gate = make_gate(config.width, experts)
    activation: Activation = "gelu" if config.family == "gpt" else "swiglu"
    routed = Experts(experts.num_experts, config.width, experts.hidden, activation, std=residual_std(config))
    shared = dense(config, experts.shared) if experts.shared else None
    if shared is not None and experts.shared_gate:
        shared = SharedExpert(shared, config.width)
    return MixtureOfExperts(gate, routed, shared)


def make_gate(width: int, config: ExpertsConfig) -> Gate:
    """Make the gate of one layer. Fields of the config are arguments of the same name, or of `_ARGUMENTS`."""
    if config.gate == "hierarchical":
        return HierarchicalGate(
            width,
            config.groups,
            config.num_experts // config.groups,
            top_groups=config.num_chosen_groups,
            top_experts=config.top_k // config.num_chosen_groups,
            importance=config.importance,
            load=config.load,
            capacity=config.capacity,
        )
    top_k = () if config.gate in ("switch", "gshard") else (config.top_k,)  # which choose 1 and 2
    fields = {name: getattr(config, name) for name in GATE_FIELDS[config.gate]}
    arguments = {_ARGUMENTS.get(name, name): value for name, value in fields.items()}
    return _GATES[config.gate](width, config.num_experts, *top_k, **arguments)


_GATES: dict[str, Callable[..., Gate]] = {
    "softmax": SoftmaxGate,
    "noisy-top-k": NoisyTopKGate,
    "switch": SwitchGate,
    "gshard": GShardGate,
    "sigmoid": SigmoidGate,
}
_ARGUMENTS = {"group_top_k": "top_groups"}


@final
class SharedExpert(nn.Module):
    """An expert that sees every token, weighted by a sigmoid of the token: Qwen2-MoE."""

    def __init__(self, expert: nn.Module, width: int) -> None:
        super().__init__()
        self.expert = expert
        self.weight = Linear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weighted: Tensor = torch.sigmoid(self.weight(x)) * self.expert(x)
        return weighted
