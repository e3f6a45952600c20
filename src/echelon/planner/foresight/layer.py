"""What one layer costs on one rank: seconds of a microbatch, bytes that it saves, messages that it sends.

All numbers are per layer and microbatch. `tokens` are those of this rank: its part of the sequences along
`context`, and all of them along `tensor`.
"""

from math import ceil
from typing import NamedTuple

from echelon.planner.cluster.cluster import Cluster
from echelon.planner.foresight.collectives import exchange_seconds, ring_seconds
from echelon.planner.foresight.kernels import (
    BYTES,
    attention_seconds,
    product_seconds,
    stream_seconds,
)
from echelon.planner.foresight.practice import Practice
from echelon.planner.foresight.settings import Settings
from echelon.planner.shape.shape import Matrix, ModelShape

_NARROW = ("fp8", "fp4")
_BACK_ATTENTION = 3.0  # operations of fused attention's backward pass: five products, not two
_MISALIGNED_SCORES = 6.0  # batched products of heads whose rows are not multiples of 16 bytes
_COMPILED = 0.78  # of the traffic of kernels between products is left
# Bytes that a forward pass moves per number: one kernel reads and writes it. In models of transformers, norms
# are a chain of kernels in float32, turns of queries and keys one in bfloat16, and so is GPT-2's GELU.
# Counted; profiles on one H200 agree.
_FUSED, _PLAIN_NORM, _PLAIN_TURN, _PLAIN_GELU = 4.0, 32.0, 17.0, 15.0
_PLAIN_NORM_SAVED, _PLAIN_GELU_SAVED = 4.0, 6.0  # bytes that these save, more than one kernel
_EXPERT_TILE = 64  # tokens: an expert's last tile may be almost empty


class LayerCost(NamedTuple):
    """Seconds of one layer and microbatch; messages by axis, all of them, hidden or not."""

    forward: float
    backward: float
    weights: float  # of `backward`: gradients for weights
    attention: float  # of `forward`: what recompute=selective makes again
    tensor: float  # messages of a forward pass; the backward pass has as many
    context: float
    expert: float
    saved: float  # bytes for the backward pass, with nothing recomputed
    kept: float  # bytes of it with recompute=selective
    checkpoint: float  # bytes of the layer's input


class LayerCosts(NamedTuple):
    """Costs of a layer without experts, and of one with them."""

    dense: LayerCost
    sparse: LayerCost


class _Compute(NamedTuple):
    forward: float
    backward: float
    weights: float


def layer_costs(
    shape: ModelShape, cluster: Cluster, practice: Practice, settings: Settings, sequences: int
) -> LayerCosts:
    """Return the costs of the layers of a model, for a microbatch of so many sequences."""
    dense = layer_cost(shape, cluster, practice, settings, sequences, shape.sequence, False)
    if shape.experts is None:
        return LayerCosts(dense, dense)
    return LayerCosts(dense, layer_cost(shape, cluster, practice, settings, sequences, shape.sequence, True))


def layer_cost(
    shape: ModelShape,
    cluster: Cluster,
    practice: Practice,
    settings: Settings,
    sequences: int,
    sequence: int,
    sparse: bool,
) -> LayerCost:
    """Return the cost of one layer."""
    tokens = ceil(sequences * sequence / settings.context)
    matrices = _matrices(shape, cluster, settings, tokens, sparse)
    scores = _scores(shape, cluster, practice, settings, sequence, tokens)
    stream = _stream(shape, cluster, practice, settings, tokens, sparse)
    forward = matrices.forward + scores.forward + stream
    backward = matrices.backward + scores.backward + 2 * stream
    saved, kept, checkpoint = saved_bytes(shape, practice, settings, sequence, tokens, sparse)
    return LayerCost(
        forward,
        backward,
        matrices.weights,
        scores.forward,
        _tensor_seconds(shape, cluster, settings, tokens),
        _context_seconds(shape, cluster, settings, tokens),
        _expert_seconds(shape, cluster, practice, settings, tokens) if sparse else 0.0,
        saved,
        kept,
        checkpoint,
    )


def _matrices(shape: ModelShape, cluster: Cluster, settings: Settings, tokens: int, sparse: bool) -> _Compute:
    forward = inputs = weights = 0.0
    for matrix, times in shape.products(sparse=sparse):
        m, n, k = _local_product(shape, settings, matrix, tokens, times)
        forward += product_seconds(cluster.device, settings.precision, m, n, k)
        inputs += product_seconds(cluster.device, settings.precision, m, k, n)
        if not settings.frozen:
            weights += product_seconds(cluster.device, settings.precision, k, n, m)
    return _Compute(forward, inputs + weights, weights)


def _local_product(
    shape: ModelShape, settings: Settings, matrix: Matrix, tokens: int, times: int
) -> tuple[int, int, int]:
    """The m, n and k of a rank's part of a product."""
    n, k, m, ranks = matrix.outputs, matrix.inputs, tokens, settings.tensor
    if times > 1 and (experts := shape.experts) is not None:
        ranks = min(settings.tensor, settings.expert_tensor)
        local = max(1, experts.number // settings.expert)
        each = tokens * times * ranks / (settings.tensor * local)
        m = local * ceil(each / _EXPERT_TILE) * _EXPERT_TILE
    if matrix.split == "column":
        n = ceil(n / ranks)
    elif matrix.split == "row":
        k = ceil(k / ranks)
    return m, n, k


def _scores(
    shape: ModelShape,
    cluster: Cluster,
    practice: Practice,
    settings: Settings,
    sequence: int,
    tokens: int,
) -> _Compute:
    """Scores and what follows from them, of this rank's heads."""
    device = cluster.device
    if practice.flash:
        flops = tokens * shape.score_flops(sequence) / settings.tensor
        if not practice.skips_masked and not shape.bidirectional:
            flops *= 2
        width = (shape.key_width + shape.value_width) / (2 * shape.heads)
        seconds = attention_seconds(device, settings.precision, flops / practice.attention, width)
        return _Compute(seconds, _BACK_ATTENTION * seconds, 0.0)
    heads = ceil(shape.heads / settings.tensor)
    rows = tokens * heads
    precision = "bf16" if settings.precision in _NARROW else settings.precision
    width = shape.key_width // shape.heads
    products = product_seconds(device, precision, rows, sequence, width)
    products += product_seconds(device, precision, rows, width, sequence)
    if width * activation_bytes(settings) % 16:
        products *= _MISALIGNED_SCORES
    # Forward: the product writes 2 bytes per score, softmax reads and writes 4, dropout 5; back the same.
    traffic = 11.0 if shape.dropout else 8.0
    moved = stream_seconds(device, traffic * rows * sequence)
    return _Compute(products + moved, 2 * products + 1.3 * moved, 0.0)


def _stream(
    shape: ModelShape, cluster: Cluster, practice: Practice, settings: Settings, tokens: int, sparse: bool
) -> float:
    """Seconds of norms, residuals, activation functions and positions, in a forward pass."""
    ranks = settings.tensor
    residual = 7 if shape.dropout else 6  # two reads and a write; dropout writes its mask
    norm, turn, gelu = _bytes_of_kernels(shape, practice, settings)
    around = 2 * (norm + residual) * shape.hidden / (ranks if settings.sequence else 1)
    width = shape.ffn
    if sparse and shape.experts is not None:
        width = shape.experts.shared + shape.experts.top_k * shape.experts.hidden
        sorts = 2 if practice.sorts_arrivals and settings.expert > 1 else 1
        around += sorts * 8.0 * shape.experts.top_k * shape.hidden / ranks  # sorted by expert, and back
    within = (6 if shape.gated else gelu) * width / ranks
    turned = (shape.key_width + shape.kv_width) / ranks
    within += turned * ((0.0 if shape.learned_positions else turn) + (norm if shape.qk_norm else 0.0))
    size = practice.traffic * (around + within)
    if settings.precision in _NARROW:  # inputs are read and written again, narrow, in both layouts
        size += 4.0 * sum(
            times * matrix.inputs / (ranks if matrix.split == "row" else 1)
            for matrix, times in shape.products(sparse=sparse)
        )
    if settings.compiled:  # most of these kernels become one
        size *= _COMPILED
    wide = 4.0 if settings.precision == "fp64" else 2.0 if settings.precision == "fp32" else 1.0
    return stream_seconds(cluster.device, wide * size * tokens) / cluster.device.kernels


def _bytes_of_kernels(
    shape: ModelShape, practice: Practice, settings: Settings
) -> tuple[float, float, float]:
    """Bytes per number of a norm, of what turns queries and keys by their position, and of an activation
    function without a gate."""
    if settings.compiled:
        return _FUSED, _FUSED, _FUSED
    if not shape.plain:
        return _FUSED, practice.turn_bytes, _FUSED
    return _PLAIN_NORM if shape.norm_vectors == 1 else _FUSED, _PLAIN_TURN, _PLAIN_GELU


def _tensor_seconds(shape: ModelShape, cluster: Cluster, settings: Settings, tokens: int) -> float:
    """Two all-reduces of the hidden states; with `sequence`, the same bytes in two halves each."""
    size = activation_bytes(settings) * tokens * shape.hidden
    return 2 * ring_seconds(cluster, size, settings.tensor, passes=2)


def _context_seconds(shape: ModelShape, cluster: Cluster, settings: Settings, tokens: int) -> float:
    ranks, stride = settings.context, settings.tensor
    if ranks == 1:
        return 0.0
    size = activation_bytes(settings) * tokens / settings.tensor
    if settings.attention == "all-to-all":
        widths = 2 * shape.query_width + 2 * shape.kv_width
        return 4 * exchange_seconds(cluster, size * widths / 4, ranks, stride)
    return ring_seconds(cluster, size * 2 * shape.kv_width * ranks, ranks, stride)


def _expert_seconds(
    shape: ModelShape, cluster: Cluster, practice: Practice, settings: Settings, tokens: int
) -> float:
    """Tokens to their experts, and back."""
    assert shape.experts is not None
    share = settings.tensor if settings.sequence or settings.expert_tensor < settings.tensor else 1
    size = activation_bytes(settings) * tokens * shape.experts.top_k * shape.hidden / share
    stride = settings.tensor if settings.expert_tensor == settings.tensor else 1
    return 2 * exchange_seconds(cluster, size, settings.expert, stride, practice.exchange_starts)


def activation_bytes(settings: Settings) -> float:
    """Bytes of a number that passes between layers."""
    return {"fp64": 8.0, "fp32": 4.0}.get(settings.precision, 2.0)


def saved_bytes(
    shape: ModelShape,
    practice: Practice,
    settings: Settings,
    sequence: int,
    tokens: int,
    sparse: bool,
) -> tuple[float, float, float]:
    """Bytes that a layer saves: with nothing recomputed, with recompute=selective, and of its input alone.

    For GPT this is Korthikanti et al. 2022 (arXiv:2205.05198): s·b·h·(10 + 24/t + 5·a·s/(h·t)), all of it
    over t with sequence parallelism, without the last term if recomputed selectively, and 2·s·b·h of inputs.
    """
    ranks, unit = settings.tensor, activation_bytes(settings)
    # Inputs of products: narrow where these are, and not needed without gradients for weights.
    kept_input = (
        0.0 if settings.frozen else BYTES[settings.precision] if settings.precision in _NARROW else unit
    )
    width, routed = shape.ffn, shape.hidden
    if sparse and (experts := shape.experts) is not None:
        width = experts.shared + experts.top_k * experts.hidden
        is_copied = settings.expert > 1 or not practice.fused_experts
        routed += experts.top_k * shape.hidden if is_copied else 0  # each expert's tokens
    whole = 2 * unit * shape.hidden + kept_input * (
        shape.hidden + routed
    )  # inputs of norms, and of both parts
    whole += 2 * shape.hidden if shape.dropout else 0  # masks
    split = unit * (shape.key_width + 2 * shape.kv_width + shape.value_width)
    gated = 2.0 if sparse and practice.fused_experts else practice.gated_inputs
    split += (gated * unit if shape.gated else unit) * width + kept_input * width
    scores = 0.0 if practice.flash else practice.saves_scores * shape.heads * sequence / ranks
    share = ranks if settings.sequence else 1
    dense = tokens * (whole / share + split / ranks)
    kept = dense * (1 - practice.frees)  # recompute=selective makes the rest again
    if shape.norm_vectors == 1:  # RMSNorm
        dense += tokens * 2 * practice.norm_bytes * shape.hidden / share
    if shape.plain and not settings.compiled:
        dense += tokens * (_plain_norm_bytes(shape) / share + _plain_gelu_bytes(shape) / ranks)
    checkpoint = unit * tokens * shape.hidden / share
    if settings.split_checkpoints:
        checkpoint /= ranks
    return dense + tokens * scores, kept, checkpoint


def _plain_norm_bytes(shape: ModelShape) -> float:
    """Bytes per token that norms of plain torch save: their input in float32 in place of bfloat16, and of
    queries and keys also what they return, before the weight."""
    if shape.norm_vectors > 1:
        return 0.0
    turned = shape.key_width + shape.kv_width if shape.qk_norm else 0
    return _PLAIN_NORM_SAVED * 2 * shape.hidden + (_PLAIN_NORM_SAVED + 2) * turned


def _plain_gelu_bytes(shape: ModelShape) -> float:
    return 0.0 if shape.gated else _PLAIN_GELU_SAVED * shape.ffn
