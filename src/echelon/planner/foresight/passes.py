"""A microbatch on one stage: seconds of its forward and backward pass, by part, and what is hidden."""

from collections.abc import Sequence
from typing import NamedTuple

from echelon.planner.cluster.cluster import Cluster
from echelon.planner.foresight.collectives import exchange_seconds, ring_seconds
from echelon.planner.foresight.host import stage_kernels, waiting_seconds
from echelon.planner.foresight.kernels import product_seconds, stream_seconds
from echelon.planner.foresight.layer import LayerCost, LayerCosts
from echelon.planner.foresight.memory import expert_copies, has_fused_head, stage_parameters
from echelon.planner.foresight.practice import Practice
from echelon.planner.foresight.settings import Settings
from echelon.planner.foresight.stages import StageKind
from echelon.planner.shape.shape import ModelShape

_NARROW = ("fp8", "fp4")
# Layers whose forward pass runs again; `selective` is a part of a layer.
_AGAIN = {"none": 0.0, "selective": 0.0, "full": 1.0, "sqrt": 1.0}
# A head that is fused with its loss: its columns are a multiple of 64; the product writes 2 bytes for a
# logit, the loss reads them twice and writes the gradient.
_HEAD_ALIGNMENT, _FUSED_TRAFFIC = 64, 8.0
_COUNT = 8.0  # bytes
_BEHIND_LAYER = 0.8  # of a layer's computation, that messages of tensor ranks can hide behind


class Pass(NamedTuple):
    """Seconds of a microbatch on one stage, by part."""

    compute: float = 0.0
    recompute: float = 0.0
    host: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    data: float = 0.0
    offload: float = 0.0
    hidden: float = 0.0  # of messages
    weights: float = 0.0  # of `compute`: gradients for weights

    @property
    def total(self) -> float:
        return sum(self[:8])

    def plus(self, other: "Pass", times: float) -> "Pass":
        return Pass._make([one + times * each for one, each in zip(self, other, strict=True)])


def stage_passes(
    shape: ModelShape,
    cluster: Cluster,
    practice: Practice,
    settings: Settings,
    stages: Sequence[StageKind],
    costs: LayerCosts,
    head: Pass,
) -> list[Pass]:
    """Return the pass of a microbatch through each stage, without messages to others."""
    dense, sparse = (
        _layer(shape, cluster, practice, settings, cost, has_experts) if any(counts) else Pass()
        for cost, has_experts, counts in (
            (costs.dense, False, [stage.dense for stage in stages]),
            (costs.sparse, True, [stage.sparse for stage in stages]),
        )
    )
    if settings.records_first:  # a third of the head's work is its forward pass
        head = head._replace(recompute=head.compute / 3)
    passes, times = [], 2 + _again(settings)
    for stage in stages:
        work = head if stage.head else Pass()
        busy = 0.0 if practice.runs_ahead else -work.total
        work = work.plus(dense, stage.dense) if stage.dense else work
        work = work.plus(sparse, stage.sparse) if stage.sparse else work
        kernels = times * stage_kernels(shape, practice, settings, stage)
        host = waiting_seconds(practice, cluster.device, kernels, busy + work.total)
        passes.append(work._replace(host=host))
    return passes


def _again(settings: Settings) -> float:
    """How often the forward pass of a layer runs again."""
    again = settings.remade if settings.recompute == "budget" else _AGAIN[settings.recompute]
    return again + settings.records_first


def _layer(
    shape: ModelShape,
    cluster: Cluster,
    practice: Practice,
    settings: Settings,
    cost: LayerCost,
    sparse: bool,
) -> Pass:
    again = _again(settings)
    recompute = again * cost.forward
    if settings.recompute == "selective":
        recompute += practice.remakes * cost.forward + (0.0 if practice.flash else cost.attention)
    times = 2 + again  # a forward pass, a backward pass, and perhaps the forward pass again
    compute = cost.forward + cost.backward
    tensor = times * cost.tensor
    tensor_hidden = min(practice.hide_tensor * tensor, _BEHIND_LAYER * compute)
    context = times * cost.context
    context_hidden = min(0.9 * context, (3 + again) * cost.attention)
    expert = times * cost.expert
    if cost.expert and practice.sorts_arrivals:  # each forward pass first says how many tokens it sends
        counts = exchange_seconds(cluster, _COUNT, settings.expert, settings.tensor, practice.exchange_starts)
        expert += (1 + settings.records_first) * counts
    expert_hidden = min(practice.hide_expert * expert, compute)
    device = compute + recompute + tensor + context + expert - tensor_hidden - context_hidden - expert_hidden
    data, data_hidden = _gathers(shape, cluster, practice, settings, sparse, compute + recompute)
    return Pass(
        compute,
        recompute,
        0.0,
        tensor - tensor_hidden,
        context - context_hidden,
        expert - expert_hidden,
        data,
        _copies(shape, cluster, settings, cost, device),
        tensor_hidden + context_hidden + expert_hidden + data_hidden,
        cost.weights,
    )


def _gathers(
    shape: ModelShape,
    cluster: Cluster,
    practice: Practice,
    settings: Settings,
    sparse: bool,
    compute: float,
) -> tuple[float, float]:
    """Exposed and hidden seconds of a layer's weights and gradients, in each microbatch, from zero=2 on."""
    once = practice.keeps_gathered and settings.zero == 3 and settings.pipeline > 1
    if settings.zero < 2 or settings.copies == 1 or once:
        return 0.0, 0.0
    stage = StageKind(0, 1, float(not sparse), float(sparse), False, False)
    counts = stage_parameters(shape, settings, stage)
    groups = (settings.shards, min(settings.shards, expert_copies(settings)))
    seconds = 0.0
    for count, ranks in zip(counts, groups, strict=True):
        gathers = 2 + settings.records_first if settings.zero == 3 else 0
        seconds += gathers * ring_seconds(cluster, count * settings.weight_bytes, ranks, settings.tensor)
        if not settings.frozen:
            seconds += ring_seconds(cluster, count * settings.message_bytes, ranks, settings.tensor)
    seconds /= practice.gather_share
    hidden = min(seconds, practice.hide_gathers * compute)
    return seconds - hidden, hidden


def _copies(shape: ModelShape, cluster: Cluster, settings: Settings, cost: LayerCost, device: float) -> float:
    """Copies of a layer to the host and back, where they take longer than what the device does meanwhile."""
    size = 0.0
    if "activations" in settings.offload:
        size += 2 * (cost.checkpoint if settings.recompute in ("full", "sqrt") else cost.saved)
    if "parameters" in settings.offload:  # fetched for both passes, gradients stored
        size += 2 * shape.dense_layer_parameters / settings.tensor * settings.weight_bytes
    return max(0.0, size / cluster.host.bandwidth - device)


def head_pass(shape: ModelShape, cluster: Cluster, practice: Practice, settings: Settings, size: int) -> Pass:
    """The logits and the loss of a microbatch."""
    tokens = -(-size * shape.sequence // settings.context)
    n, k, device = -(-shape.vocab // settings.tensor), shape.hidden, cluster.device
    precision = "bf16" if settings.precision in _NARROW else settings.precision
    traffic = practice.logit_traffic
    if has_fused_head(shape, practice, settings):
        n, traffic = -(-n // _HEAD_ALIGNMENT) * _HEAD_ALIGNMENT, _FUSED_TRAFFIC
    seconds = product_seconds(device, precision, tokens, n, k)
    seconds += product_seconds(device, precision, tokens, k, n)
    weights = 0.0 if settings.frozen else product_seconds(device, precision, k, n, tokens)
    moved = stream_seconds(device, traffic * tokens * n)
    return Pass(compute=seconds + weights + moved, weights=weights)
