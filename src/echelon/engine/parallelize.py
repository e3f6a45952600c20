"""parallelize(): composes the strategies of a plan around a model. Read top to bottom; each line one axis."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from torch import nn

from echelon.collectives.mesh import Mesh
from echelon.engine.arguments import check_arguments, check_average
from echelon.engine.audit import Mode
from echelon.engine.audit.auditing import AuditSettings
from echelon.engine.audit.plain_form import PlainForm
from echelon.engine.auto import Task, chosen, resolve
from echelon.engine.compiling import compile_layers, compiler_options
from echelon.engine.engine import Engine
from echelon.engine.model_checks import accept_model
from echelon.engine.setup import Setup
from echelon.engine.sharing import accumulate_gradients, adds_in_place, share_stages
from echelon.engine.stage_split import split_stages
from echelon.engine.start import fill, prepare, start_equal
from echelon.engine.step.balance import GateList
from echelon.engine.step.batch_reader import BatchReader, read_sample
from echelon.engine.step.samples import make_scopes
from echelon.engine.updates import UpdateRule, make_update
from echelon.memory.activation_offload.offload import offload_activations
from echelon.memory.gist.layer import compress_layers
from echelon.memory.recompute.recompute import recompute_layers
from echelon.nn.batch import Objective
from echelon.nn.float8 import multiply_in_float8
from echelon.nn.head.deferred import DeferredHead, find_head
from echelon.nn.losses import Loss
from echelon.nn.wrapping import Wrapping, find_wrapper, has_entry
from echelon.parallel.called_stage import connect_stages
from echelon.parallel.data.zero.units import SMALLEST as SMALLEST_UNIT
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.observer import Observers
from echelon.parallel.stage import LocalStages
from echelon.parallel.tensor.modules import Column
from echelon.parallel.tensor.styles import Table
from echelon.plan import Plan
from echelon.state.ownership import StateNames
from echelon.update.nonfinite import MOST_SKIPPED, Nonfinite, NonfiniteRule
from echelon.update.optim.local import Make
from echelon.update.precision.loss_scaling import LossScale


def parallelize(
    model: nn.Module,
    plan: Plan | str,
    *,
    optimizer: Make,
    loss: Loss | None = None,
    objective: Objective | None = None,
    clip: float | None = None,
    loss_scale: LossScale | None = None,
    schedule: Callable[[int], float] | None = None,
    prefetch: int = 1,
    smallest_unit: int = SMALLEST_UNIT,
    seed: int | None = 0,
    layers: str | Sequence[str] | None = None,
    boundaries: Sequence[int] | None = None,
    sample_batch: Any = None,
    tensor_table: Table | None = None,
    weights: str | Path | None = None,
    resident_bytes: int = 0,
    audit: Mode = "sampled",
    check_every: int = 200,
    nonfinite: Nonfinite = "allow",
    most_skipped: int = MOST_SKIPPED,
    average: float | None = None,
) -> Engine:
    """An engine that trains `model` as `plan` says, equal to training on one device.

    Args:
        model: any module. Stages and split sequences need one that lists its layers, or `layers`.
        plan: a line like "data=2 zero=1", or a `Plan`; "auto" is chosen for `sample_batch`.
        optimizer: is called with this rank's parameters, and returns a torch optimizer.
        loss: (output, target) → a mean over samples, or (total, count) for an exact mean over tokens.
            None takes the model's own loss.
        objective: (model, batch) → the loss, where it is no function of output and target.
        clip: the bound of the global gradient norm.
        loss_scale: what precision=fp16 multiplies losses by: a number or "dynamic", as None.
        schedule: maps the step to a factor of the learning rate.
        prefetch: how many units zero=3 gathers ahead.
        smallest_unit: bytes that make a module a unit, if the model lists no layers.
        seed: of dropout, whose masks do not depend on the plan. None leaves them to torch.
        layers: the list in the model, or lists, whose children are its layers, like "transformer.h".
        boundaries: the layers before which stages begin, if not evenly.
        sample_batch: a global batch, on which pipeline=auto measures layers.
        tensor_table: {"blocks.*.up": "column"} for modules that tensor parallelism does not know.
        weights: a Hugging Face folder, of which each rank reads its part.
        resident_bytes: of weights that stay on the device with offload=parameters.
        audit: which steps are compared with one device before they change a weight: "sampled" (1, 2, 4,
            8, …), "first", "always" or "off".
        check_every: steps after which ranks compare what all hold alike. 0: never.
        nonfinite: a step not finite is made ("allow"), skipped ("skip"), or an error ("stop").
        most_skipped: so many skipped steps in a row are an error.
        average: the decay of a moving average of the weights (`engine.averaged`).
    """
    given = (boundaries, tensor_table, weights, layers, audit, check_every)
    check_arguments(model, plan, optimizer, loss, clip, prefetch, seed, *given)
    plan = chosen(plan, Task(model, loss, objective, layers, tensor_table), sample_batch)  # "auto"
    with ExitStack() as undo:  # a call that fails leaves no groups, no hooks and no wrapping behind
        wrapping = undo.enter_context(Wrapping())
        model, plan, loss = accept_model(model, plan, loss, clip, loss_scale, objective, layers, wrapping)
        skipping = NonfiniteRule.of(nonfinite, most_skipped, plan)
        rule = UpdateRule(optimizer, clip, schedule, seed, loss_scale, skipping, check_average(average, plan))
        model, source = prepare(model, plan, weights)
        plan, boundaries = resolve(model, plan, read_sample(model, plan, loss, sample_batch), boundaries)
        mesh = undo.enter_context(closing(Mesh.join(plan)))
        start_equal(model, mesh.group("all"), mesh.device, source)
        scopes = make_scopes(model, mesh, seed, wrapping)  # dropout
        multiply_in_float8(model, plan, wrapping)  # precision=fp8
        names, gates = StateNames.of(model), GateList.of(model, plan)
        audited = AuditSettings(audit, check_every, PlainForm(model, names, wrapping))  # as it is
        sharding = LayerSharding(model, mesh, loss, tensor_table, wrapping)  # tensor, context, expert
        split = split_stages(model, mesh, boundaries, by_layers=sharding.by_layers)  # pipeline
        sharding.connect(model, split.modules, split.program, wrapping)
        local = share_stages(split, mesh, sharding, wrapping, prefetch, smallest_unit, resident_bytes)
        undo.callback(local.close)
        fill(model, plan, local.sharings, sharding.in_whole, source)  # a model without memory
        update = make_update(local, mesh, sharding, wrapping, rule)
        observers = wrap_layers(local, mesh, sharding, wrapping)  # compile, compress, recompute, offload
        reader = BatchReader(model, plan, loss, by_layers=split.by_layers)  # what a batch may be
        strategies = (mesh, sharding, local, update, rule, scopes, reader, observers, wrapping)
        engine = Engine(Setup(model, names, gates, *strategies), audited)
        undo.pop_all()
        return engine


def wrap_layers(local: LocalStages, mesh: Mesh, layers: LayerSharding, wrapping: Wrapping) -> Observers:
    """Wrap the layers of this rank's stages as the plan says, in this order from the inside outward; returns
    the memory savers that are to see its steps."""
    observers = Observers()
    adds = adds_in_place(local, mesh.plan)
    compile_layers(local.stages.values(), mesh.plan, wrapping, adds_products=adds)
    accumulate_gradients(local, mesh.plan, wrapping)
    defer_logits(local, mesh.plan, layers, wrapping)
    compress_layers(list(local.stages.values()), mesh, wrapping, observers)
    recompute_layers(local, mesh, layers.view, wrapping, observers)
    offload_activations(local, mesh, wrapping, observers)
    connect_stages(local, wrapping, observers)
    return observers


def defer_logits(local: LocalStages, plan: Plan, layers: LayerSharding, wrapping: Wrapping) -> None:
    """Let the logits of the last stage wait for the loss, which computes them in chunks if it can."""
    is_low = plan.precision not in ("fp32", "fp64")
    last = local.stages.get(len(local.program.placement) - 1) if is_low else None
    head = None if last is None else find_head(last.module)
    column = None if head is None else find_wrapper(head, Column)
    if head is not None and not (has_entry(head, "tensor") and (column is None or column.part() is None)):
        wrapping.wrap(DeferredHead(head, layers.deferral, compiled=plan.compile, split=column))
        if plan.compile and plan.flushes:  # a loss that is not known; versions of weights change in between
            layers.compile_loss(compiler_options(plan))
