"""The shape of a transformer: every number that its cost depends on, and none of its weights.

A layer is attention and a feed-forward part. `Matrix` is one of its products per token, and says how `tensor`
ranks share it:

    column   y = x·[A₁, A₂]            each rank has a part of the outputs
    row      z = [y₁, y₂]·[B₁; B₂]     each rank has a part of the inputs
    whole    every rank has all of it (gates, and the narrow side of latent attention)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from echelon.errors import raise_errors
from echelon.models.config import value_errors

Split = Literal["column", "row", "whole"]


class Matrix(NamedTuple):
    """A product per token: `inputs` numbers become `outputs` numbers."""

    inputs: int
    outputs: int
    split: Split

    @property
    def size(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Experts:
    """Mixtures of experts: `top_k` of `number` for each token, in every `every`-th layer after the first
    `first_dense` ones. `shared`: width of the expert that sees all tokens. `gate_rows`: if not `number`.
    `has_loss`: a loss balances the gates, a function of the whole batch."""

    number: int
    top_k: int
    hidden: int
    shared: int = 0
    first_dense: int = 0
    every: int = 1
    gate_rows: int | None = None
    has_loss: bool = False

    def __post_init__(self) -> None:
        errors = value_errors(self, "count", "number", "top_k", "hidden", "every")
        errors += value_errors(self, "count or 0", "shared", "first_dense")
        if not errors and self.top_k > self.number:
            errors.append(f"top_k={self.top_k} number={self.number}: a token has at most all experts")
        raise_errors("the experts of a shape", errors)


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's attention: keys and values are made from `kv_rank` numbers per token, queries from
    `query_rank` (0: from the hidden state). Of a head, `rope` numbers turn with the position and `nope` do
    not; its value has `value` numbers."""

    query_rank: int
    kv_rank: int
    rope: int
    nope: int
    value: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a transformer. `norm_vectors` is 2 for LayerNorm (weight and bias), 1 for RMSNorm.
    `plain`: RMSNorm, rotary positions and GELU are chains of plain kernels, as in models of transformers."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    kv_heads: int
    ffn: int
    head_width: int
    gated: bool = False
    tied: bool = False
    bias: bool = False
    qk_norm: bool = False
    norm_vectors: int = 1
    learned_positions: int = 0
    bidirectional: bool = False
    dropout: bool = False
    plain: bool = False
    other_parameters: int = 0  # of nothing above, as a traced module has them; counted with the head
    experts: Experts | None = None
    latent: LatentAttention | None = None

    def __post_init__(self) -> None:
        counts = ("layers", "hidden", "heads", "vocab", "sequence", "kv_heads", "head_width")
        errors = value_errors(self, "count", *counts)
        errors += value_errors(self, "count or 0", "ffn", "learned_positions")
        if not errors and self.heads % self.kv_heads:
            errors.append(
                f"heads={self.heads} kv_heads={self.kv_heads}: each key/value head serves an equal number of "
                f"heads; make heads a multiple of {self.kv_heads}"
            )
        raise_errors(f"the shape '{self.name}'", errors)

    @property
    def query_width(self) -> int:
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width

    @cached_property
    def key_width(self) -> int:
        """Numbers of all heads whose products are scores."""
        return self.query_width if self.latent is None else self.heads * (self.latent.rope + self.latent.nope)

    @cached_property
    def value_width(self) -> int:
        """Numbers of all heads that attention returns."""
        return self.query_width if self.latent is None else self.heads * self.latent.value

    @cached_property
    def attention(self) -> tuple[Matrix, ...]:
        """The products of attention, but scores."""
        if (latent := self.latent) is None:
            return (
                Matrix(self.hidden, self.query_width + 2 * self.kv_width, "column"),
                Matrix(self.query_width, self.hidden, "row"),
            )
        queries: tuple[Matrix, ...] = (Matrix(self.hidden, self.key_width, "column"),)
        if latent.query_rank:
            queries = (
                Matrix(self.hidden, latent.query_rank, "whole"),
                Matrix(latent.query_rank, self.key_width, "column"),
            )
        return (
            *queries,
            Matrix(self.hidden, latent.kv_rank + latent.rope, "whole"),
            Matrix(latent.kv_rank, self.heads * (latent.nope + latent.value), "column"),
            Matrix(self.value_width, self.hidden, "row"),
        )

    def feed_forward(self, width: int) -> tuple[Matrix, ...]:
        """The products of a dense feed-forward part of this width."""
        if not width:
            return ()
        columns = (2 if self.gated else 1) * width
        return Matrix(self.hidden, columns, "column"), Matrix(width, self.hidden, "row")

    @cached_property
    def gate(self) -> tuple[Matrix, ...]:
        if self.experts is None:
            return ()
        return (Matrix(self.hidden, self.experts.gate_rows or self.experts.number, "whole"),)

    def has_experts(self, layer: int) -> bool:
        return (
            self.experts is not None
            and layer >= self.experts.first_dense
            and (layer - self.experts.first_dense) % self.experts.every == 0
        )

    @cached_property
    def sparse_layers(self) -> int:
        """How many layers have experts."""
        return sum(map(self.has_experts, range(self.layers)))

    @cached_property
    def dense_layer_parameters(self) -> int:
        """Parameters of a layer without experts."""
        return self._around_parameters + self._feed_forward_parameters(self.ffn)

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        assert self.experts is not None
        return sum(matrix.size for matrix in self.feed_forward(self.experts.hidden))

    @cached_property
    def shared_layer_parameters(self) -> int:
        """Parameters of a layer with experts that `expert` ranks do not divide."""
        assert self.experts is not None
        gates = sum(matrix.size for matrix in self.gate)
        return self._around_parameters + gates + self._feed_forward_parameters(self.experts.shared)

    @cached_property
    def _around_parameters(self) -> int:
        """Attention and norms."""
        count = sum(matrix.size for matrix in self.attention) + 2 * self.norm_vectors * self.hidden
        count += 2 * self.head_width if self.qk_norm else 0
        if self.latent is not None:  # which has norms of its own
            count += self.latent.query_rank + self.latent.kv_rank
        if self.bias:
            count += self.query_width + 2 * self.kv_width + self.hidden
        return count

    def _feed_forward_parameters(self, width: int) -> int:
        if not width:
            return 0
        biases = width + self.hidden if self.bias else 0
        return sum(matrix.size for matrix in self.feed_forward(width)) + biases

    @cached_property
    def embedding_parameters(self) -> int:
        return (self.vocab + self.learned_positions) * self.hidden

    @cached_property
    def head_parameters(self) -> int:
        """The last norm and the projection, which is the embedding's where the two are tied."""
        projection = 0 if self.tied else self.vocab * self.hidden
        return projection + self.norm_vectors * self.hidden + self.other_parameters

    @cached_property
    def num_routed_parameters(self) -> int:
        """Parameters of experts that gates choose from."""
        if self.experts is None:
            return 0
        return self.sparse_layers * self.experts.number * self.expert_parameters

    @cached_property
    def num_parameters(self) -> int:
        """The exact number of parameters; a tied weight counts once."""
        return self._without_routed + self.num_routed_parameters

    @cached_property
    def num_active_parameters(self) -> int:
        """The number of parameters that compute one token."""
        if self.experts is None:
            return self.num_parameters
        return self._without_routed + self.sparse_layers * self.experts.top_k * self.expert_parameters

    @cached_property
    def _without_routed(self) -> int:
        dense = (self.layers - self.sparse_layers) * self.dense_layer_parameters
        sparse = self.sparse_layers * self.shared_layer_parameters if self.experts else 0
        return dense + sparse + self.embedding_parameters + self.head_parameters

    def products(self, *, sparse: bool) -> Iterator[tuple[Matrix, int]]:
        """The products of a layer, and how often each runs for a token."""
        yield from ((matrix, 1) for matrix in self.attention)
        if sparse and self.experts is not None:
            yield from ((matrix, 1) for matrix in self.gate)
            yield from ((matrix, 1) for matrix in self.feed_forward(self.experts.shared))
            yield from ((matrix, self.experts.top_k) for matrix in self.feed_forward(self.experts.hidden))
        else:
            yield from ((matrix, 1) for matrix in self.feed_forward(self.ffn))

    def score_flops(self, sequence: int) -> float:
        """Operations of one token's scores and their product with values; half of them where causal."""
        whole = 2.0 * sequence * (self.key_width + self.value_width)
        return whole if self.bidirectional else whole / 2

    def layer_flops(self, sequence: int, *, sparse: bool = False) -> float:
        """Operations of one token in the forward pass of a layer."""
        matrices = sum(2.0 * matrix.size * times for matrix, times in self.products(sparse=sparse))
        return matrices + self.score_flops(sequence)

    def step_flops(self, sequence: int, tokens: float) -> float:
        """Operations of a step over so many tokens, without recomputation: forward, and twice that back."""
        dense = (self.layers - self.sparse_layers) * self.layer_flops(sequence)
        sparse = self.sparse_layers * self.layer_flops(sequence, sparse=True)
        return 3.0 * tokens * (dense + sparse + 2.0 * self.hidden * self.vocab)
