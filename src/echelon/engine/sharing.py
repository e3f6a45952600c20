"""How each stage's parameters are divided into sets, and how the ranks of each set share it."""

from collections.abc import Collection, Sequence

from torch import nn

from echelon.async_training import WorkerGradients
from echelon.collectives import RecordingGroup
from echelon.data_parallel import (
    AllReduce,
    Buffers,
    HostPlace,
    ParameterServer,
    ParameterSet,
    ShardGroups,
    SharedGradient,
    Sharing,
    SingleReplica,
    UnitAllReduce,
    Zero,
    accumulate_in_place,
    divide_units,
    named_subset,
    synchronize_batch_norm,
)
from echelon.engine.arguments import check_resident_bytes
from echelon.engine.deferred_start import take_memory
from echelon.engine.host_memory_check import check_host_memory, parameter_bytes
from echelon.engine.layer_sharding import LayerSharding
from echelon.engine.stage_split import StageSplit
from echelon.mesh import Mesh
from echelon.plan import ASYNCHRONOUS_SCHEDULES, Plan
from echelon.runtime import LocalStages, Stage
from echelon.wrapping import Wrapping


def share_stages(
    split: StageSplit,
    mesh: Mesh,
    layers: LayerSharding,
    wrapping: Wrapping,
    prefetch: int,
    smallest_unit: int,
    resident_bytes: int = 0,
) -> LocalStages:
    """This rank's stages, each with its parameter sets shared as the plan says; all have memory then."""
    check_resident_bytes(resident_bytes, mesh.plan)
    check_host_memory({"parameters": parameter_bytes(split.modules, mesh, resident_bytes)}, mesh)
    take_memory(split.modules.values(), mesh)
    if mesh.plan.sync == "async":
        return _worker_stages(split, mesh)
    synchronize_batch_norm(split.modules.values(), mesh.group("data"), wrapping, parts=_num_parts(mesh))
    stages = {}
    host = _host_place(mesh, resident_bytes)
    for number, module in split.modules.items():
        shared = [*layers.shared_gradients(module), *split.shared_gradients[number]]
        sets = parameter_sets(module, mesh, shared, split.tied, layers.norm_elsewhere, smallest_unit)
        sharings = [share(each, mesh.plan, wrapping, prefetch, host) for each in sets]
        stages[number] = Stage(number, module, sharings, Buffers(module, mesh.group("weights")))
    return LocalStages(stages, split.program, split.boundaries)


def _host_place(mesh: Mesh, resident_bytes: int) -> HostPlace | None:
    if "parameters" not in mesh.plan.offload:
        return None
    return HostPlace(mesh.boundary, resident_bytes, updates="optimizer" in mesh.plan.offload)


def _num_parts(mesh: Mesh) -> int:
    """In how many parts the samples of a replica pass through a stage before an update."""
    if mesh.plan.schedule in ("pipedream", "pipedream-vertical"):
        return 1  # each microbatch has an update of its own
    return max(mesh.plan.microbatches, mesh.group("data").size // mesh.plan.data)


def _worker_stages(split: StageSplit, mesh: Mesh) -> LocalStages:
    """The stages of an asynchronous worker, which pulls and pushes all of its parameters at once."""
    group = mesh.group("weights")
    parameters = {name: p for module in split.modules.values() for name, p in named_subset(module).items()}
    in_float32 = mesh.plan.gradients == "fp32"
    gradients = WorkerGradients(ParameterSet("dense", parameters, group, sum_in_float32=in_float32))
    stages = {
        number: Stage(number, module, [gradients], Buffers(module, group))
        for number, module in split.modules.items()
    }
    return LocalStages(stages, split.program, split.boundaries)


def parameter_sets(
    module: nn.Module,
    mesh: Mesh,
    shared_gradients: Sequence[SharedGradient],
    tied: frozenset[nn.Parameter],
    norm_elsewhere: Collection[nn.Parameter],
    smallest_unit: int,
) -> list[ParameterSet]:
    """The sets of a stage: all of its parameters, over the ranks that hold the same weights."""
    group, offload = mesh.group("weights"), mesh.plan.offload
    by_unit = "parameters" in offload or "optimizer" in offload or mesh.plan.update != "step"
    by_unit = by_unit or (mesh.plan.zero > 0 and group.size > 1)
    shards = ShardGroups(mesh.group("shard"), mesh.group("copies"))
    if "parameters" in offload and mesh.plan.zero == 0:  # each rank has a copy of its own
        shards = ShardGroups(RecordingGroup("shard", ledger=group.ledger), group)
    units = divide_units(module, smallest_unit) if by_unit else []
    parameters = named_subset(module)
    return [
        ParameterSet(
            "dense",
            parameters,
            group,
            units,
            shared_gradients,
            norm_elsewhere=frozenset(norm_elsewhere),
            sum_in_float32=mesh.plan.gradients == "fp32",
            shards=shards,
            separate_shards=tied,
        )
    ]


def share(
    parameter_set: ParameterSet,
    plan: Plan,
    wrapping: Wrapping,
    prefetch: int,
    host: HostPlace | None = None,
) -> Sharing:
    """How the ranks of a set hold it, and agree on its gradients."""
    in_backward, is_single = plan.update != "step", parameter_set.group.size == 1
    # Replicas of a stage that take microbatches in turn are in different backward passes.
    waits = set(plan.replicas) == {1}
    if host or (not is_single and (plan.zero == 3 or (plan.zero and parameter_set.trained))):
        return Zero(
            parameter_set,
            plan.zero or 1,
            wrapping,
            prefetch=prefetch,
            in_backward=in_backward,
            waits=waits,
            contiguous=plan.contiguous,
            host=host,
        )
    if in_backward:
        return UnitAllReduce(parameter_set, waits=waits)
    if is_single:
        return SingleReplica(parameter_set)
    if plan.sync == "parameter-server":
        return ParameterServer(parameter_set)
    return AllReduce(parameter_set)


def accumulate_gradients(local: LocalStages, plan: Plan, wrapping: Wrapping) -> None:
    """Let large matrices add to their gradients in place, where several microbatches make one gradient and
    one backward pass makes it; what is compiled goes its own way."""
    if (
        plan.compile
        or plan.microbatches == 1
        or plan.schedule in ASYNCHRONOUS_SCHEDULES
        or local.program.halves
    ):
        return
    for stage in local.stages.values():
        accumulations = {
            parameter: sharing.accumulation
            for sharing in stage.sharings
            if sharing.accumulation is not None
            for _, parameter in sharing.parameter_set.trained
        }
        accumulate_in_place(stage.module, accumulations, wrapping)
