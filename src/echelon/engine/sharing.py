"""Divide each stage's parameters into sets, and choose how the ranks of each set share it."""

from collections.abc import Collection, Sequence

from torch import nn

from echelon.collectives import RecordingGroup
from echelon.collectives.mesh import Mesh
from echelon.engine.arguments import check_resident_bytes
from echelon.engine.stage_split import StageSplit
from echelon.engine.start import take_memory
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.added_products import accumulate_compiled
from echelon.parallel.data.all_reduce import AllReduce, UnitAllReduce
from echelon.parallel.data.batch_norm import check_worker_norms, synchronize_batch_norm
from echelon.parallel.data.buffers import Buffers
from echelon.parallel.data.grad_accumulation import accumulate_in_place
from echelon.parallel.data.parameter_server import ParameterServer
from echelon.parallel.data.parameter_set import ParameterSet, ShardGroups, SharedGradient, named_subset
from echelon.parallel.data.sharing import Sharing, SingleReplica
from echelon.parallel.data.zero.host_weights import HostPlace
from echelon.parallel.data.zero.units import divide_units, merge_units
from echelon.parallel.data.zero.zero import Zero
from echelon.parallel.expert.modules import experts_of
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.stage import LocalStages, Stage
from echelon.plan import Plan
from echelon.update.async_training.update import WorkerGradients
from echelon.update.offload.host_updates import check_host_memory, parameter_bytes


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
        check_worker_norms(split.modules.values(), mesh.plan, is_start=True)
        return _worker_stages(split, mesh)
    # In how many parts the samples of a replica pass through a stage before an update.
    parts = max(
        mesh.plan.microbatches // mesh.plan.updates_per_step, mesh.group("data").size // mesh.plan.data
    )
    synchronize_batch_norm(split.modules.values(), mesh.group("data"), wrapping, parts=parts)
    stages, host = {}, None
    if "parameters" in mesh.plan.offload:
        host = HostPlace(mesh.boundary, resident_bytes, updates="optimizer" in mesh.plan.offload)
    for number, module in split.modules.items():
        shared = [*layers.shared_gradients(module), *split.shared_gradients[number]]
        sets = parameter_sets(module, mesh, shared, split.tied, layers.norm_elsewhere, smallest_unit)
        sharings = [share(each, mesh.plan, wrapping, prefetch, host) for each in sets]
        for sharing in sharings:
            if sharing.reducer is not None:
                sharing.reducer.is_alone = mesh.plan.stages == 1
        buffers = Buffers(module, mesh.group("weights"))
        stages[number] = Stage(number, module, sharings, buffers, smallest_unit)
    return LocalStages(stages, split.program, split.boundaries)


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
    """The sets of a stage: experts, over the ranks that hold the same ones, and all other parameters, over
    the ranks that hold the same weights. Gradients of experts, which are larger, are reduced first."""
    experts = frozenset(experts_of(module))
    dense, plan = frozenset(module.parameters()) - experts, mesh.plan
    # A set is gathered, reduced or updated unit by unit.
    by_unit = "parameters" in plan.offload or "optimizer" in plan.offload or plan.update != "step"

    def make(name: str, parameters: frozenset[nn.Parameter], axes: tuple[str, str, str]) -> ParameterSet:
        group, *groups = map(mesh.group, axes)
        is_sharded, shards = plan.zero > 0 and group.size > 1, ShardGroups(*groups)
        if "parameters" in plan.offload and plan.zero == 0:  # each has a copy of its own on the host
            shards = ShardGroups(RecordingGroup("shard", ledger=group.ledger), group)
        units = divide_units(module, smallest_unit, only=parameters) if by_unit or is_sharded else []
        if plan.zero == 1 and plan.update == "step" and not plan.offload:  # each stays whole
            units = merge_units(units)
        return ParameterSet(
            name,
            named_subset(module, parameters),
            group,
            units,
            [each for each in shared_gradients if each.parameter in parameters],
            norm_elsewhere=frozenset(norm_elsewhere),
            sum_in_float32=mesh.plan.gradients == "fp32",
            shards=shards,
            separate_shards=tied,
        )

    sets = [make("experts", experts, ("experts", "expert_shard", "expert_copies"))] if experts else []
    return [*sets, make("dense", dense, ("weights", "shard", "copies"))]


def share(
    parameter_set: ParameterSet, plan: Plan, wrapping: Wrapping, prefetch: int, host: HostPlace | None = None
) -> Sharing:
    """Choose how the ranks of a set hold it, and agree on its gradients."""
    in_backward, is_single = plan.update != "step", parameter_set.group.size == 1
    # Replicas of a stage that take microbatches in turn are in different backward passes.
    waits = set(plan.replicas) == {1}
    is_shared_out = parameter_set.shard_groups.shard.size > 1
    if host or (is_shared_out and (plan.zero == 3 or (plan.zero and parameter_set.trained))):
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


def adds_in_place(local: LocalStages, plan: Plan) -> bool:
    """Return whether several microbatches make one gradient, and one backward pass makes it."""
    return plan.microbatches > 1 and plan.flushes and not local.program.halves


def accumulate_gradients(local: LocalStages, plan: Plan, wrapping: Wrapping) -> None:
    """Let large matrices add to their gradients in place."""
    if not adds_in_place(local, plan):
        return
    for stage in local.stages.values():
        accumulations = {
            parameter: sharing.accumulation
            for sharing in stage.sharings
            if sharing.accumulation is not None
            for _, parameter in sharing.parameter_set.trained
        }
        if plan.compile:
            accumulate_compiled(accumulations)
        else:
            accumulate_in_place(stage.module, accumulations, wrapping)
