"""What a host needs to issue a step's kernels. A stage takes at least that, whatever its device could do.

    a pass through a layer      host_layer · (1, or host_sparse + host_expert · experts + host_context)
    a microbatch on a stage     host_microbatch + host_chunk · chunks
    a step                      host_step

These are of a program (`Practice`), on the host of an A100; `Device.host_pace` says how other hosts compare.
"""

from echelon.planner.cluster.cluster import Device
from echelon.planner.foresight.practice import Practice
from echelon.planner.foresight.settings import Settings
from echelon.planner.foresight.stages import StageKind
from echelon.planner.shape.shape import ModelShape

_NARROW = ("fp8", "fp4")


def stage_kernels(shape: ModelShape, practice: Practice, settings: Settings, stage: StageKind) -> float:
    """The kernels of one pass through a stage's layers, as a multiple of those of a layer without experts."""
    if _is_replayed(shape, settings):
        return 0.0
    kernels = stage.dense
    if stage.sparse and shape.experts is not None:
        each = practice.host_sparse + practice.host_expert * shape.experts.number / settings.expert
        kernels += stage.sparse * each
    if settings.context > 1:
        kernels += stage.layers * practice.host_context
    is_turned = not shape.learned_positions and not settings.compiled
    return kernels * (practice.host_turn if is_turned else 1.0)


def _is_replayed(shape: ModelShape, settings: Settings) -> bool:
    """Whether passes are replayed as a CUDA graph (docs/graphs.md)."""
    is_plain = settings.recompute == "none" and settings.update == "step" and not settings.offload
    is_recorded = settings.graphs and settings.ranks == 1 and shape.experts is None
    return is_recorded and is_plain and settings.precision not in _NARROW


def waiting_seconds(practice: Practice, device: Device, kernels: float, busy: float) -> float:
    """Seconds in which a device that is otherwise `busy` for so many waits for its kernels. A processor
    issues them itself, and computes nothing meanwhile."""
    return max(0.0, device.host_pace * practice.host_layer * kernels - busy) + device.host_layer * kernels


def step_waiting_seconds(practice: Practice, device: Device, settings: Settings) -> float:
    """Seconds of a step and its microbatches in which every stage waits for its host."""
    microbatch = practice.host_microbatch + settings.chunks * practice.host_chunk
    return device.host_pace * (practice.host_step + settings.microbatches * microbatch)
