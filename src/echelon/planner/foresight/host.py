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

_COMPILED = 1 / 2  # of the kernels of a layer are left


def stage_kernels(shape: ModelShape, practice: Practice, settings: Settings, stage: StageKind) -> float:
    """The kernels of one pass through a stage's layers, as a multiple of those of a layer without experts."""
    kernels = stage.dense
    if stage.sparse and shape.experts is not None:
        each = practice.host_sparse + practice.host_expert * shape.experts.number / settings.expert
        kernels += stage.sparse * each
    if settings.context > 1:
        kernels += stage.layers * practice.host_context
    return kernels * (_COMPILED if settings.compiled else 1.0)


def waiting_seconds(practice: Practice, device: Device, kernels: float, busy: float) -> float:
    """Seconds in which a device that is otherwise `busy` for so many waits for its kernels. A processor
    issues them itself, and computes nothing meanwhile."""
    return max(0.0, device.host_pace * practice.host_layer * kernels - busy) + device.host_layer * kernels


def step_waiting_seconds(practice: Practice, device: Device, settings: Settings) -> float:
    """Seconds of a step and its microbatches in which every stage waits for its host."""
    microbatch = practice.host_microbatch + settings.chunks * practice.host_chunk
    return device.host_pace * (practice.host_step + settings.microbatches * microbatch)
