"""Build the update of weights from gradients under a plan: the user's optimizer over what this rank holds."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from echelon.collectives.agreement import check_on_every_rank
from echelon.collectives.mesh import Mesh
from echelon.engine.arguments import check_optimizer
from echelon.engine.watch.watch import check_coupling
from echelon.errors import UserError, raise_errors
from echelon.nn.batch import DTYPES
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.sharing import Sharing, SingleReplica
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.stage import LocalStages
from echelon.plan import Plan
from echelon.state.ownership import LocalParameter, own_run
from echelon.update.async_training.update import AsyncUpdate, WorkerGradients
from echelon.update.averaging import average_bytes
from echelon.update.nonfinite import NonfiniteRule
from echelon.update.offload.host_updates import (
    check_host_memory,
    check_host_optimizer,
    make_host_stepper,
    updates_on_host,
)
from echelon.update.optim.local import Make, make_whole
from echelon.update.optim.needs import Need, check_parts, inner_optimizers, need_of
from echelon.update.optim.optimizers import CombinedOptimizer
from echelon.update.optim.sum_optimizer import SumOptimizer
from echelon.update.parameter_parts import has_parts, make_exchange, make_routes
from echelon.update.precision.loss_scaling import LossScale, make_loss_scaling
from echelon.update.precision.rounding import KeyedRounding, Placement, RoundingStepper, runs_of
from echelon.update.precision.stepper import (
    DirectStepper,
    LocalStepper,
    MasterStepper,
    Stepper,
    check_takes_units,
)
from echelon.update.precision.whole_stepper import WholeStepper
from echelon.update.synchronous_update import SynchronousUpdate
from echelon.update.update import Update


class UpdateRule(NamedTuple):
    """The user's rule for updates. `seed`: of what they draw."""

    optimizer: Make
    clip: float | None = None
    schedule: Callable[[int], float] | None = None
    seed: int | None = 0
    loss_scale: LossScale | None = None
    nonfinite: NonfiniteRule = NonfiniteRule()
    average: float | None = None


def make_update(
    local: LocalStages, mesh: Mesh, layers: LayerSharding, wrapping: Wrapping, rule: UpdateRule
) -> Update:
    """The update of all ranks together, or each worker's own (sync=async)."""
    plan = mesh.plan
    make = _checked(rule.optimizer, plan)
    if plan.sync == "async":
        gradients = local.sharings[0]  # all stages of a worker have the same
        assert isinstance(gradients, WorkerGradients)
        return AsyncUpdate(
            gradients,
            local.share_buffers,
            make,
            ranks=mesh.layout.group("data", mesh.rank),
            staleness=plan.staleness,
            clip=rule.clip,
            schedule=rule.schedule,  # of versions, which the server counts, and not of an engine's steps
            stepper=MasterStepper if has_masters(plan) else DirectStepper,
            loss_scaling=make_loss_scaling(rule.loss_scale, plan.precision),
        )
    deferred = reads_late(mesh.device)
    made = make_whole(make, local.trained())
    _check_sparse_gradients(made, local, plan)
    _check_average(rule.average, made, plan)
    stepper = _make_stepper(made, local, mesh, layers, wrapping, rule, deferred=deferred)
    if "parameters" in plan.offload and not updates_on_host(plan):
        stepper.use_units(local.sharings)
    for sharing in local.sharings:
        sharing.updates_products = stepper.takes_products or plan.microbatches > plan.updates_per_step
    update = SynchronousUpdate(
        local,
        stepper,
        # In a pipeline that never drains, stages are at different updates, and sum only over their own ranks.
        mesh.group("all" if plan.flushes else "stage"),
        rule.clip,
        everyone=mesh.group("all"),
        schedule=rule.schedule,
        steady=plan.flushes,
        deferred=deferred,
        in_backward=plan.update != "step",
        loss_scaling=make_loss_scaling(rule.loss_scale, plan.precision, mesh.device if deferred else None),
        skips_nonfinite=rule.nonfinite.skips,
        average=rule.average,
    )
    if update.averages is not None and stepper.on_host:
        mesh.boundary.account("optimizer", update.averages.storages)
    return update


def _make_stepper(
    optimizer: torch.optim.Optimizer,
    local: LocalStages,
    mesh: Mesh,
    layers: LayerSharding,
    wrapping: Wrapping,
    rule: UpdateRule,
    *,
    deferred: bool,
) -> Stepper:
    """The optimizer over what this rank holds, as the optimizer needs it."""
    masters, on_host = has_masters(mesh.plan), updates_on_host(mesh.plan)
    rounding = None if mesh.plan.masters else KeyedRounding(rule.seed or 0)
    if on_host:
        check_host_optimizer(optimizer, mesh)
    if _needs_whole(optimizer, mesh.plan):
        routes = make_routes(local, layers, mesh)
        return WholeStepper(optimizer, routes, masters=masters, rounding=rounding, deferred=deferred)
    if on_host:
        placements = {} if rounding is None else _placements(local, layers, torch.device("cpu"))
        on_twins = make_host_stepper(optimizer, local, mesh, wrapping, rounding, placements, masters=masters)
        averages = 0 if rule.average is None else average_bytes(local.local_parameters())
        check_host_memory({"optimizer": on_twins.host_bytes() + averages}, mesh)
        stepper: LocalStepper = on_twins
    elif rounding is not None:
        placements = _placements(local, layers, mesh.device)
        stepper = RoundingStepper(
            optimizer, local.local_parameters(), placements, rounding, deferred=deferred
        )
    else:
        kind = MasterStepper if masters else DirectStepper
        stepper = kind(optimizer, local.local_parameters(), deferred=deferred)
    if isinstance(optimizer, SumOptimizer | CombinedOptimizer):
        device = torch.device("cpu") if on_host else mesh.device
        optimizer.share(make_exchange(stepper, local, layers, mesh, device))
    return stepper


def _needs_whole(optimizer: torch.optim.Optimizer, plan: Plan) -> bool:
    """Return whether parameters must be put together for the optimizer."""
    return has_parts(plan) and need_of(optimizer) is Need.WHOLE


def _check_sparse_gradients(optimizer: torch.optim.Optimizer, local: LocalStages, plan: Plan) -> None:
    """Refuse embeddings with sparse=True that `optimizer`, over the model's own parameters, cannot update:
    if it gets parameters whole from ranks with parts of them, or gradients on the host, or needs sums."""
    on_host = updates_on_host(plan)
    takes_none = on_host or _needs_whole(optimizer, plan)
    refusing = [each for each in inner_optimizers(optimizer) if takes_none or isinstance(each, SumOptimizer)]
    refused = {p for each in refusing for group in each.param_groups for p in group["params"]}
    other = "drop offload=optimizer" if on_host else "give it to SparseAdam"

    def check() -> None:
        modules = [inner for outer in local.modules for inner in outer.modules()]
        tables = [
            each for each in modules if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse
        ]
        names: dict[Tensor, str] = {
            parameter: name
            for sharing in local.sharings
            if isinstance(sharing, SingleReplica)  # others sum dense gradients
            for name, parameter in sharing.parameter_set.trained
        }
        errors = [
            f"{names[table.weight]} is of an embedding with sparse=True, and the update needs all elements "
            f"of its gradient; set sparse=False, or {other}"
            for table in tables
            if table.weight in names and table.weight in refused
        ]
        raise_errors(f"the optimizer {type(optimizer).__name__} with plan '{plan}'", errors)

    if plan.stages > 1:  # an embedding is on one of them
        check_on_every_rank(check)
    else:
        check()


def _check_average(average: float | None, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuse averages of masters that one rank has whole, and others in parts that are coarser."""
    if average is not None and has_masters(plan) and _needs_whole(optimizer, plan):
        raise UserError(
            f"average={average} with optimizer {type(optimizer).__name__} and plan '{plan}': the optimizer "
            "needs whole parameters, so that one rank has the float32 master of all parts, and averages are "
            "of parts; use precision=fp32, another optimizer, or zero=0, tensor=1 and expert=1"
        )


def has_masters(plan: Plan) -> bool:
    return DTYPES[plan.precision].itemsize < 4 and plan.masters


def _placements(
    local: LocalStages, layers: LayerSharding, device: torch.device
) -> dict[nn.Parameter, Placement]:
    """Return where the elements of each local parameter lie in the whole one."""

    def runs(sharing: Sharing, each: LocalParameter) -> Placement:
        part = torch.empty(each.tensor.numel(), device="meta")
        boxes = [box for own in own_run(part, sharing.slices(each)) for box in layers.in_whole(own)]
        return Placement.of(each.name, runs_of(boxes, device))

    return {each.tensor: runs(sharing, each) for sharing, each in local.slices()}


def reads_late(device: torch.device) -> bool:
    """Return whether the numbers of a step stay on the device until they are read."""
    return device.type != "cpu"


def _checked(make: Make, plan: Plan) -> Make:
    """`make`, with a check of what it makes. In a pipeline it is given a part of the model."""

    def make_and_check(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        given = list(parameters)
        made = make(given) if plan.stages == 1 else _made_of_part(make, given)
        optimizer = CombinedOptimizer(made) if _are_optimizers(made) else made
        check_optimizer(optimizer, given, whole=plan.stages == 1)
        if has_parts(plan):
            check_parts(optimizer, f"plan '{plan}'")
        check_coupling(optimizer, plan)
        _check_sparse(optimizer, plan)
        if plan.update != "step":
            check_takes_units(optimizer)
        return optimizer

    return make_and_check


def _made_of_part(make: Make, given: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Call the function on a rank that has a part of the model, where `model[0].weight` may be None."""
    try:
        return make(given)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"the function that makes the optimizer failed: {type(error).__name__}: {error}. In a pipeline a "
            "rank has the weights of its own stages, and those of others are None: choose from the "
            "parameters that the function is given, or from model.named_parameters()"
        ) from error


def _are_optimizers(made: object) -> TypeGuard[Sequence[torch.optim.Optimizer]]:
    """Return whether a function has made several optimizers."""
    if not isinstance(made, list | tuple) or not made:
        return False
    return all(isinstance(each, torch.optim.Optimizer) for each in made)


def _check_sparse(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuse an optimizer that takes sparse gradients alone, where ranks sum them, or units have them."""
    if not isinstance(optimizer, torch.optim.SparseAdam):
        return
    if plan.ranks > plan.stages:
        raise UserError(
            f"the optimizer SparseAdam with plan '{plan}': it takes sparse gradients alone, and ranks sum "
            "dense ones; use an Adam for all parameters and sparse=False, or one replica"
        )
    if "parameters" in plan.offload:
        raise UserError(
            f"the optimizer SparseAdam with plan '{plan}': it takes sparse gradients alone, and those of a "
            "unit are dense; use an Adam for all parameters and sparse=False, or drop offload=parameters"
        )
