"""Bytes of one rank of a stage at the peak of a step."""

from functools import lru_cache
from typing import NamedTuple

from echelon.planner.foresight.layer import LayerCosts, activation_bytes
from echelon.planner.foresight.practice import Practice
from echelon.planner.foresight.prediction import Memory
from echelon.planner.foresight.schedules import kept_microbatches
from echelon.planner.foresight.settings import Settings
from echelon.planner.foresight.stages import StageKind
from echelon.planner.foresight.states import StateBytes, state_bytes
from echelon.planner.shape.shape import ModelShape

_FUSED_VOCABULARY = 1024  # a smaller head is not computed together with its loss


@lru_cache(maxsize=4096)
def layer_parameters(shape: ModelShape, ranks: int, sparse: bool) -> float:
    """Parameters of a layer on one of `ranks` tensor ranks, without the experts that gates choose from."""
    total = shape.shared_layer_parameters if sparse else shape.dense_layer_parameters
    matrices = [*shape.attention]
    if sparse and shape.experts is not None:
        matrices += shape.feed_forward(shape.experts.shared)
    else:
        matrices += shape.feed_forward(shape.ffn)
    split = sum(matrix.size for matrix in matrices if matrix.split != "whole")
    if shape.bias:  # of column matrices
        split += sum(matrix.outputs for matrix in matrices if matrix.split == "column")
    return total - split + split / ranks


def stage_parameters(shape: ModelShape, settings: Settings, stage: StageKind) -> tuple[float, float]:
    """Parameters that one rank of a stage computes with: dense, and of routed experts."""
    ranks = settings.tensor
    dense = stage.dense * layer_parameters(shape, ranks, False)
    routed = 0.0
    if stage.sparse and shape.experts is not None:
        dense += stage.sparse * layer_parameters(shape, ranks, True)
        local = shape.experts.number / settings.expert * shape.expert_parameters
        routed = stage.sparse * local / settings.expert_tensor
    vocabulary = shape.vocab * shape.hidden / ranks
    if stage.embedding:
        dense += vocabulary + shape.learned_positions * shape.hidden
    if stage.head:
        is_own = not shape.tied or not stage.embedding  # a tied weight has a copy on both ends
        dense += shape.norm_vectors * shape.hidden + shape.other_parameters + (vocabulary if is_own else 0)
    return dense, routed


def expert_copies(settings: Settings) -> int:
    """Ranks that hold the same experts."""
    spread = settings.copies * settings.tensor // settings.expert_tensor
    return max(1, spread // settings.expert)


def stage_states(shape: ModelShape, settings: Settings, stage: StageKind) -> StateBytes:
    """Weights, gradients and optimizer state of one rank of a stage."""
    parts = zip(
        stage_parameters(shape, settings, stage),
        (settings.shards, min(settings.shards, expert_copies(settings))),
        strict=True,
    )
    dense, routed = (
        state_bytes(
            count,
            ranks,
            settings.zero,
            weight=settings.weight_bytes,
            gradient=0.0 if settings.frozen else settings.gradient_bytes,
            optimizer=0.0 if settings.frozen else settings.optimizer_bytes,
        )
        for count, ranks in parts
    )
    return StateBytes(*(one + other for one, other in zip(dense, routed, strict=True)))


class HeadBytes(NamedTuple):
    """Bytes of the head: saved for the backward pass of a microbatch, and all of it at the peak."""

    saved: float
    peak: float


def has_fused_head(shape: ModelShape, practice: Practice, settings: Settings) -> bool:
    """Whether the head is computed together with its loss, in chunks, so that no logit is kept."""
    is_one = settings.tensor == 1 and activation_bytes(settings) < 4
    return bool(practice.most_logits) and is_one and shape.vocab >= _FUSED_VOCABULARY


def head_bytes(shape: ModelShape, practice: Practice, settings: Settings, tokens: int) -> HeadBytes:
    """Return what logits and their loss hold."""
    unit = activation_bytes(settings)
    logits = tokens * shape.vocab / settings.tensor
    if not practice.most_logits:
        # With tensor ranks, the head's input is gathered, and its gradient.
        gathered = 2 * unit * tokens * shape.hidden if settings.tensor > 1 else 0.0
        return HeadBytes(0.0, practice.logit_bytes * logits + gathered)
    norm = (2 * unit + (practice.norm_bytes if shape.norm_vectors == 1 else 0.0)) * tokens * shape.hidden
    if has_fused_head(shape, practice, settings):
        return HeadBytes(norm, norm + min(practice.logit_bytes * logits, practice.most_logits))
    # The logits, and what their loss made of them; a large head of one rank keeps only that.
    is_large = settings.tensor == 1 and shape.vocab >= _FUSED_VOCABULARY
    saved = norm + (max(4.0, unit) + (0.0 if is_large else unit)) * logits
    return HeadBytes(saved, saved + unit * logits)


class StageMemory(NamedTuple):
    """What one rank of a stage holds whatever its microbatches are."""

    states: StateBytes
    gathered: float  # weights and gradients of the layers that compute now
    reduced: float  # gradients of the layer whose sum is under way
    fills_first: bool  # see `kept_microbatches`
    sums_at_once: bool  # see `Practice`

    def at_peak(self, settings: Settings, stage: StageKind, costs: LayerCosts, head: HeadBytes) -> Memory:
        """Return the bytes at the peak of a step."""
        kept = _kept(settings, stage, self.fills_first)
        activations, remade = _activations(settings, stage, costs, kept)
        logits = kept * head.saved if stage.head else 0.0
        held = max(remade, logits)  # logits are gone before layers are made again
        parameters, gradients, optimizer = self.states
        host = 0.0
        if settings.offload:
            if "optimizer" in settings.offload:
                # And the rank's parts of gradients and weights, on their way.
                ranks = settings.shards if settings.zero else 1
                host += gradients / (ranks if settings.zero == 1 else 1)
                host += parameters / (ranks if settings.zero < 3 else 1) + optimizer
                optimizer = 0.0
            if "parameters" in settings.offload:
                host, parameters = host + parameters, 0.0
            if "activations" in settings.offload:  # those of two layers are on the device
                part = min(1.0, 2 / max(1.0, stage.layers * kept)) * activations
                host, activations = host + activations - part, part
        gone = _largest_saved(stage, costs) if self.sums_at_once else 0.0
        temporary = max(0.0, head.peak - held if stage.head else 0.0)
        return Memory(
            parameters,
            gradients + max(0.0, self.reduced - gone),
            optimizer,
            activations + held,
            0.0,
            self.gathered,
            temporary,
            host,
        )


def _kept(settings: Settings, stage: StageKind, fills_first: bool) -> float:
    """How many microbatches a stage keeps of each of its layers."""
    kept = kept_microbatches(
        settings.schedule,
        settings.pipeline,
        stage.first,
        settings.microbatches,
        settings.chunks,
        fills_first=fills_first,
    )
    # The head in place of a layer: the last chunk has one less, and is the one that keeps one microbatch.
    is_short = settings.chunks > 1 and stage.head and (stage.layers + 1) % settings.chunks == 0
    return (kept * (stage.layers + 1) - 1) / stage.layers if is_short and stage.layers else kept


def fixed_memory(shape: ModelShape, practice: Practice, settings: Settings, stage: StageKind) -> StageMemory:
    """Return what a rank of a stage holds whatever its microbatches are."""
    states = stage_states(shape, settings, stage)
    largest = _largest_unit(shape, settings, stage)
    gathered = 0.0
    if practice.keeps_gathered and settings.zero == 3 and settings.pipeline > 1:
        whole = stage_states(shape, settings._replace(zero=0), stage)
        gathered += whole.parameters + whole.gradients
    elif settings.zero == 3 or "parameters" in settings.offload:  # the layer that computes, and the next one
        gathered += 2 * largest * settings.weight_bytes
    # A layer's gradient is whole until it is summed; then each rank keeps its shard.
    others = 1 - 1 / settings.shards if settings.zero >= 2 else 0.0
    reduced = others * largest * settings.gradient_bytes
    if settings.update != "step":  # a gradient is gone as soon as its unit is updated
        states = states._replace(gradients=min(states.gradients, 2 * largest * settings.gradient_bytes))
    return StageMemory(states, gathered, reduced, practice.fills_first, practice.sums_at_once)


def _largest_unit(shape: ModelShape, settings: Settings, stage: StageKind) -> float:
    """Parameters of the largest layer of a stage, on one rank."""
    largest = layer_parameters(shape, settings.tensor, False) if stage.dense else 0.0
    if stage.sparse and shape.experts is not None:
        experts = shape.experts.number / settings.expert / settings.expert_tensor * shape.expert_parameters
        largest = max(largest, layer_parameters(shape, settings.tensor, True) + experts)
    if stage.embedding or stage.head:
        largest = max(largest, shape.vocab * shape.hidden / settings.tensor)
    return largest


def _largest_saved(stage: StageKind, costs: LayerCosts) -> float:
    """Bytes that the largest layer saves, with nothing recomputed."""
    dense, sparse = costs
    return max(dense.saved if stage.dense else 0.0, sparse.saved if stage.sparse else 0.0)


def _activations(settings: Settings, stage: StageKind, costs: LayerCosts, kept: float) -> tuple[float, float]:
    """Bytes that wait for the backward pass, and those of layers that are being made again."""
    dense, sparse = costs
    share = settings.saved
    saved = share * (stage.dense * dense.saved + stage.sparse * sparse.saved)
    checkpoints = share * stage.layers * dense.checkpoint
    largest = _largest_saved(stage, costs)
    if settings.recompute == "none":
        return kept * saved, 0.0
    if settings.recompute == "full":
        return kept * checkpoints, largest
    if settings.recompute == "selective":
        part = share * (stage.dense * dense.kept + stage.sparse * sparse.kept)
        return kept * part, largest - (sparse.kept if stage.sparse else dense.kept)
    if settings.recompute == "sqrt":
        segments = max(1.0, round(stage.layers**0.5))
        return kept * segments * dense.checkpoint * share, saved / segments
    return min(kept * saved, max(settings.budget, kept * checkpoints)), largest
