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


def stage_states(settings: Settings, parameters: tuple[float, float]) -> StateBytes:
    """Weights, gradients and optimizer state of one rank that computes with so many `stage_parameters`."""
    gradient = 0.0 if settings.frozen else settings.gradient_bytes
    optimizer = 0.0 if settings.frozen else settings.optimizer_bytes
    weight, zero, shards = settings.weight_bytes, settings.zero, settings.shards
    dense, routed = parameters
    states = state_bytes(dense, shards, zero, weight=weight, gradient=gradient, optimizer=optimizer)
    if not routed:
        return states
    shards = min(shards, expert_copies(settings))
    experts = state_bytes(routed, shards, zero, weight=weight, gradient=gradient, optimizer=optimizer)
    return StateBytes(*(one + other for one, other in zip(states, experts, strict=True)))


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


class SavedBytes(NamedTuple):
    """Bytes that one rank of a stage saves of a microbatch."""

    each: float  # until its backward pass
    whole: float  # the same with nothing recomputed
    remade: float  # of layers that are being made again
    largest: float  # of the largest layer, with nothing recomputed


class StageMemory(NamedTuple):
    """What one rank of a stage holds whatever its microbatches are."""

    states: StateBytes
    gathered: float  # weights and gradients of the layers that compute now
    reduced: float  # gradients of the layer whose sum is under way
    fills_first: bool  # see `kept_microbatches`
    sums_at_once: bool  # see `Practice`

    def at_peak(self, settings: Settings, stage: StageKind, saved: SavedBytes, head: HeadBytes) -> Memory:
        """Return the bytes at the peak of a step."""
        kept = _kept(settings, stage, self.fills_first)
        activations = kept * saved.each
        if settings.recompute == "budget":
            activations = min(kept * saved.whole, max(settings.budget, activations))
        held, temporary = saved.remade, 0.0
        if stage.head:
            held = max(held, kept * head.saved)  # logits are gone before layers are made again
            temporary = max(0.0, head.peak - held)
        parameters, gradients, optimizer = self.states
        reduced = self.reduced
        if reduced and self.sums_at_once:
            reduced = max(0.0, reduced - saved.largest)
        memory = Memory(
            parameters,
            gradients + reduced,
            optimizer,
            activations + held,
            0.0,
            self.gathered,
            temporary,
            0.0,
        )
        return self._offloaded(memory, settings, stage.layers * kept, held) if settings.offload else memory

    def _offloaded(self, memory: Memory, settings: Settings, layers: float, held: float) -> Memory:
        """The same with what is kept on the host; activations are of so many `layers`, but those `held`."""
        parameters, gradients, optimizer = self.states
        host, activations = 0.0, memory.activations - held
        if "optimizer" in settings.offload:
            # And the rank's parts of gradients and weights, on their way.
            ranks = settings.shards if settings.zero else 1
            host += gradients / (ranks if settings.zero == 1 else 1)
            host += parameters / (ranks if settings.zero < 3 else 1) + optimizer
            optimizer = 0.0
        if "parameters" in settings.offload:
            host, parameters = host + parameters, 0.0
        if "activations" in settings.offload:  # those of two layers are on the device
            part = min(1.0, 2 / max(1.0, layers)) * activations
            host, activations = host + activations - part, part
        return memory._replace(
            parameters=parameters, optimizer=optimizer, activations=activations + held, host=host
        )


def _kept(settings: Settings, stage: StageKind, fills_first: bool) -> float:
    """How many microbatches a stage keeps of each of its layers."""
    chunks = settings.chunks
    kept = kept_microbatches(
        settings.schedule, settings.pipeline, stage.first, settings.microbatches, chunks, fills_first
    )
    if chunks == 1 or not stage.head or not stage.layers or (stage.layers + 1) % chunks:
        return kept
    # The head in place of a layer: the last chunk has one less, and is the one that keeps one microbatch.
    return (kept * (stage.layers + 1) - 1) / stage.layers


def fixed_memory(
    shape: ModelShape,
    practice: Practice,
    settings: Settings,
    stage: StageKind,
    parameters: tuple[float, float],
) -> StageMemory:
    """Return what a rank of a stage with so many `parameters` holds whatever its microbatches are."""
    states = stage_states(settings, parameters)
    largest = _largest_unit(shape, settings, stage)
    gathered = 0.0
    if practice.keeps_gathered and settings.zero == 3 and settings.pipeline > 1:
        whole = stage_states(settings._replace(zero=0), parameters)
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


def saved_by_stage(settings: Settings, stage: StageKind, costs: LayerCosts) -> SavedBytes:
    """Return what a stage saves of a microbatch."""
    dense, sparse = costs
    share, recompute = settings.saved, settings.recompute
    whole = share * (stage.dense * dense.saved + stage.sparse * sparse.saved)
    largest = max(dense.saved if stage.dense else 0.0, sparse.saved if stage.sparse else 0.0)
    if recompute == "none":
        return SavedBytes(whole, whole, 0.0, largest)
    if recompute == "selective":
        part = share * (stage.dense * dense.kept + stage.sparse * sparse.kept)
        return SavedBytes(part, whole, largest - (sparse.kept if stage.sparse else dense.kept), largest)
    if recompute == "sqrt":
        segments = max(1.0, round(stage.layers**0.5))
        return SavedBytes(share * segments * dense.checkpoint, whole, whole / segments, largest)
    return SavedBytes(share * stage.layers * dense.checkpoint, whole, largest, largest)
