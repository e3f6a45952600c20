"""What happens once in a step: gradients and weights along `data`, the update, and copies for it."""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from echelon.planner.cluster.cluster import Cluster
from echelon.planner.foresight.collectives import ring_seconds
from echelon.planner.foresight.kernels import stream_seconds
from echelon.planner.foresight.memory import expert_copies, stage_states
from echelon.planner.foresight.practice import Practice
from echelon.planner.foresight.settings import Settings
from echelon.planner.foresight.states import StateBytes

_UPDATE_PASSES = 2.0  # each value of optimizer state is read and written
# Of an all-reduce, as in parallel/data/all_reduce.py: bytes of a bucket, and how many there are at least.
_BUCKET, _LEAST_BUCKET, _FEWEST_BUCKETS = 25 * 2**20, 2**20, 4


class StepEnd(NamedTuple):
    """Seconds of the slowest stage, once in a step; none of them hidden yet."""

    exchange: float
    update: float
    copies: float


def step_end(
    cluster: Cluster,
    practice: Practice,
    settings: Settings,
    parameters: Sequence[tuple[float, float]],
    layers: float = 0.0,
) -> StepEnd:
    """Return what the end of a step takes, of stages with so many `parameters`: dense, and of experts. Each
    has at most so many `layers`."""
    if settings.frozen:
        return StepEnd(0.0, 0.0, 0.0)
    states = [stage_states(settings, counts) for counts in parameters]
    return StepEnd(
        max(_exchange(cluster, practice, settings, counts, layers) for counts in parameters),
        max(_update(cluster, settings, each, layers) for each in states),
        max(_copies(cluster, settings, each) for each in states),
    )


def _exchange(
    cluster: Cluster,
    practice: Practice,
    settings: Settings,
    parameters: tuple[float, float],
    layers: float,
) -> float:
    """Gradients among the ranks that hold the same weights; weights back, where an update was sharded."""
    if settings.copies == 1 and settings.expert_tensor == settings.tensor:
        return 0.0
    message = practice.gradient_bytes or settings.message_bytes
    stride, seconds, times = settings.tensor, 0.0, 1
    groups = (settings.copies, expert_copies(settings))
    for count, ranks in zip(parameters, groups, strict=True):
        if settings.sync == "parameter-server":  # one rank takes all gradients and sends all weights
            link = cluster.link(ranks, stride)
            seconds += (ranks - 1) * count * (message + settings.weight_bytes) / link.bandwidth
            continue
        shards = min(ranks, settings.shards)
        if practice.sums_by_layer:
            times = max(1, round(layers)) if settings.zero else _num_buckets(count * message)
        each = count / times
        if settings.zero == 0:
            seconds += times * ring_seconds(cluster, each * message, ranks, stride, passes=2)
        elif settings.zero == 1 or (settings.zero == 3 and practice.keeps_gathered and settings.pipeline > 1):
            seconds += times * ring_seconds(cluster, each * message, shards, stride)
        if settings.zero in (1, 2):
            seconds += times * ring_seconds(cluster, each * settings.weight_bytes, shards, stride)
        if settings.zero and ranks > shards:  # the sum over the groups of shards
            copies, step = ranks // shards, stride * shards
            seconds += times * ring_seconds(cluster, each / shards * message, copies, step, passes=2)
    return seconds


def _num_buckets(size: float) -> int:
    return max(1, ceil(size / min(_BUCKET, max(_LEAST_BUCKET, size / _FEWEST_BUCKETS))))


def update_bytes(settings: Settings, parameters: float) -> float:
    """Bytes that the update of so many parameters, all of them on one rank, reads and writes."""
    return _moved_by_update(stage_states(settings, (parameters, 0.0)), settings)


def _moved_by_update(states: StateBytes, settings: Settings) -> float:
    shards = settings.shards if settings.zero else 1  # each rank updates its shard
    gradients = states.gradients / (shards if settings.zero == 1 else 1)
    weights = states.parameters / (shards if settings.zero in (1, 2) else 1)
    own = weights / settings.weight_bytes * settings.update_bytes
    return _UPDATE_PASSES * states.optimizer + 2 * gradients + weights + own


def _update(cluster: Cluster, settings: Settings, states: StateBytes, layers: float) -> float:
    if "optimizer" in settings.offload:
        return 0.0
    device = cluster.device
    own = layers / (settings.shards if settings.zero else 1)  # of its layers' weights, those of its shard
    streamed = stream_seconds(device, _moved_by_update(states, settings))
    return streamed / device.update + own * device.host_update


def _copies(cluster: Cluster, settings: Settings, states: StateBytes) -> float:
    """Gradients to the host, its update, and weights back. With delay=1 the next step hides them."""
    if "optimizer" not in settings.offload or settings.delay:
        return 0.0
    shards = settings.shards if settings.zero else 1
    moved = (states.gradients / (shards if settings.zero == 1 else 1)) + states.parameters / (
        shards if settings.zero in (1, 2) else 1
    )
    update = _UPDATE_PASSES * states.optimizer / cluster.host_bandwidth
    return moved / cluster.host.bandwidth + update
