"""parallelize(): composes the strategies of a plan around a model. Read top to bottom; each line one axis."""

from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial

import torch
from torch import Tensor, nn

from echelon.data_parallel import (
    AllReduce,
    Alone,
    Asynchronous,
    ParameterServer,
    Several,
    Sync,
    Synchronous,
    Update,
    Zero,
)
from echelon.data_parallel.adding import leave_to_autograd
from echelon.data_parallel.units import SMALLEST, cut_units
from echelon.dropout import key_dropout
from echelon.engine.arguments import check_arguments, check_optimizer, check_trainable
from echelon.engine.auto import resolve
from echelon.engine.batch import Batch, Loss
from echelon.engine.compiling import compile_layers
from echelon.engine.course import Assigned
from echelon.engine.cutting import cut
from echelon.engine.engine import Engine
from echelon.engine.samples import Counts, Scopes, assume_equal_counts, gather_counts
from echelon.engine.support import refuse_unsupported
from echelon.engine.within import Within
from echelon.errors import UserError
from echelon.huggingface import frequencies
from echelon.launching import join
from echelon.mesh import Mesh, this_device
from echelon.optim.local import Make
from echelon.ownership import StateNames
from echelon.plan import Plan
from echelon.precision import DTYPES, Direct, Masters
from echelon.program import ASYNCHRONOUS, build
from echelon.tensor_parallel import Table
from echelon.wrapping import Wrapping


def parallelize(
    model: nn.Module,
    plan: Plan | str,
    *,
    optimizer: Make,
    loss: Loss,
    clip: float | None = None,
    schedule: Callable[[int], float] | None = None,
    prefetch: int = 1,
    smallest_unit: int = SMALLEST,
    seed: int | None = 0,
    boundaries: Sequence[int] | None = None,
    example: Batch | None = None,
    table: Table | None = None,
) -> Engine:
    """An engine that trains `model` as `plan` says, equal to training on one device.

    `optimizer` is given the parameters of this rank; `loss(output, target)` returns a mean over samples, or
    (total, count) for an exact mean over tokens; `clip` bounds the global gradient norm; `schedule` maps the
    step to a factor of the learning rate; `prefetch` is how many units zero=3 gathers ahead, and
    `smallest_unit` how many bytes a module needs to be a unit of its own, in a model that lists no layers.
    `seed` is that of dropout, whose masks then do not depend on the plan; None leaves them to torch.
    `boundaries` are the layers before which stages begin, if not evenly; `example` is a global batch, for
    pipeline=auto to measure the layers on. `table` says what tensor parallelism does with modules that it
    does not know: {"blocks.*.up": "column", "blocks.*.down": "row"}.
    """
    check_arguments(model, plan, optimizer, loss, clip, prefetch, seed, boundaries, example, table)
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    refuse_unsupported(plan)
    join()
    leave_to_autograd(model)
    model = _converted(model, this_device(), DTYPES[plan.precision])
    plan, found = resolve(model, plan, example)
    mesh = Mesh.join(plan)
    check_trainable(model)
    wrapping = Wrapping()
    names, scopes = StateNames.of(model), _scopes(model, mesh, seed, wrapping)
    within = Within(model, mesh, loss, table, wrapping)
    if plan.sync == "async":
        # A schedule is of versions there, which the server counts, and not of an engine's steps.
        workers = _asynchronous(model, mesh, _checked(optimizer), clip, schedule)
        held = Assigned({0: model}, {0: workers}, build("naive", (1,), plan.microbatches), [])
        if plan.compile:
            compile_layers([model])
        elif plan.microbatches > 1:
            workers.add_in_place()
        return Engine(model, names, mesh, held, workers, within, None, scopes)
    _check_clip(plan, clip)
    stages = cut(model, mesh, found if found is not None else boundaries, by_layers=within.by_layers)
    within.see(stages.mine)
    within.overlap(model, stages.program)
    syncs = {
        number: _replicate(stage, mesh, prefetch, smallest_unit, stages.alone)
        for number, stage in stages.mine.items()
    }
    sync = next(iter(syncs.values())) if len(syncs) == 1 else Several(list(syncs.values()))
    sync = within.bond(stages.tied(sync), list(stages.mine.values()))
    make = _checked(optimizer, whole=plan.stages == 1, tensor=plan.tensor)
    update = _update(sync, mesh, make, clip)
    held = Assigned(stages.mine, syncs, stages.program, stages.boundaries)
    if plan.compile:
        compile_layers(stages.mine.values())
    elif plan.microbatches > 1 and plan.schedule not in ASYNCHRONOUS and not stages.program.halves:
        for its in syncs.values():
            its.add_in_place()
    return Engine(model, names, mesh, held, update, within, schedule, scopes)


def _check_clip(plan: Plan, clip: float | None) -> None:
    if clip is not None and plan.schedule in ASYNCHRONOUS:
        raise UserError(
            f"clip={clip} schedule={plan.schedule}: clipping needs the norm over all stages, which never "
            "stand at the same update there; drop clip, or use schedule=1f1b"
        )


def _converted(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model on the device, its real numbers in `dtype`; whole and complex numbers stay what they are, and
    so do frequencies of rotary positions: in bf16 they would be off by whole turns at the 1,000th token."""
    kept = {id(buffer) for buffer in frequencies(model)}

    def convert(t: Tensor) -> Tensor:
        return t.to(device, dtype) if t.is_floating_point() and id(t) not in kept else t.to(device)

    converted: nn.Module = model._apply(convert)
    return converted


def _scopes(model: nn.Module, mesh: Mesh, seed: int | None, wrapping: Wrapping) -> Scopes:
    """Key the model's dropout, and tell where in the training its forward passes are."""
    group = mesh.group("data")
    counts: Counts = partial(gather_counts, group=group, device=mesh.device, replicas=mesh.plan.data)
    if mesh.plan.sync == "async":
        counts = partial(assume_equal_counts, group=group)
    if seed is not None:
        key_dropout(model, wrapping)
    return Scopes(model, seed, counts, mesh.position.replica, mesh.plan.microbatches)


def _checked(make: Make, *, whole: bool = True, tensor: int = 1) -> Make:
    """`make`, with a look at what it makes; unless `whole`, of a part of the model; of matrices that `tensor`
    ranks share."""

    def make_and_check(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        given = list(parameters)
        optimizer = make(given)
        check_optimizer(optimizer, given, whole=whole, tensor=tensor)
        return optimizer

    return make_and_check


def _replicate(
    model: nn.Module, mesh: Mesh, prefetch: int, smallest_unit: int, alone: Set[nn.Parameter]
) -> Sync:
    """How the ranks with the same weights hold them, and agree on gradients."""
    group = mesh.group("weights")
    if group.size == 1:
        return Alone(model)
    if mesh.plan.zero and any(p.requires_grad for p in model.parameters()):
        units = cut_units(model, smallest_unit)
        return Zero(model, group, mesh.plan.zero, units, prefetch=prefetch, alone=alone)
    if mesh.plan.sync == "parameter-server":
        return ParameterServer(model, group)
    return AllReduce(model, group)


def _update(sync: Sync, mesh: Mesh, make: Make, clip: float | None) -> Update:
    """How gradients become new weights."""
    low = DTYPES[mesh.plan.precision].itemsize < 4
    stepper = (Masters if low else Direct)(make, sync.parameters(), sync.held(), in_parts=mesh.plan.zero > 0)
    # In a pipeline that never drains, stages are at different updates, and sum only over their own ranks.
    steady = mesh.plan.schedule not in ASYNCHRONOUS
    everyone = mesh.group("all")
    group = everyone if steady else mesh.group("stage")
    return Synchronous(sync, stepper, group, clip, everyone=everyone, steady=steady)


def _asynchronous(
    model: nn.Module, mesh: Mesh, make: Make, clip: float | None, schedule: Callable[[int], float] | None
) -> Asynchronous:
    """How workers along `data` train each at its own pace."""
    low = DTYPES[mesh.plan.precision].itemsize < 4
    return Asynchronous(
        model,
        mesh.group("data"),
        make,
        groups=mesh.layout.groups("data"),
        staleness=mesh.plan.staleness,
        clip=clip,
        schedule=schedule,
        stepper=Masters if low else Direct,
    )
