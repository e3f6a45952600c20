"""Models that a plan cannot train as one device would, refused by what is in them, before anything starts.

What a module does can be read where it is torch's own. Weights that a forward of another's changes are found
in the first step: see engine/step/side_effects.py.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from echelon.engine.arguments import check_model, check_objective
from echelon.errors import raise_errors
from echelon.nn.batch import Objective
from echelon.nn.huggingface.adapters import exchanges_parameter, is_packed, reason_not_passed_on
from echelon.nn.huggingface.own_loss import gate_loss_coefficients
from echelon.nn.layering import name_layers
from echelon.nn.losses import Loss
from echelon.nn.tracing import without_compiling
from echelon.nn.wrapping import Wrapping
from echelon.parallel.own_loss import choose_loss
from echelon.parallel.stage import iterated_modules
from echelon.plan import Plan
from echelon.update.precision.loss_scaling import LossScale

_Lookup = nn.Embedding | nn.EmbeddingBag


def is_cut(plan: Plan) -> bool:
    """Return whether a forward pass sees only a part of the global batch."""
    return plan.data > 1 or plan.microbatches > 1 or plan.context > 1


def accept_model(
    model: nn.Module,
    plan: Plan | str,
    loss: Loss | None,
    clip: float | None,
    loss_scale: LossScale | None,
    objective: Objective | None,
    layers: str | Sequence[str] | None,
    wrapping: Wrapping,
) -> tuple[nn.Module, Plan, Loss]:
    """The model as it is trained, without what torch.compile has put around it; the plan; and the loss, which
    may be the model's own. `layers`: the names of the lists that have the model's layers."""
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    check_objective(objective, loss, plan)
    raise_errors("the model", list(_wrapper_errors(model)))
    model = without_compiling(model, wrapping)
    check_content(model, plan)
    check_model(model, plan, clip, loss_scale)
    name_layers(model, layers)
    return model, plan, choose_loss(model, loss, plan, objective)


def check_content(model: nn.Module, plan: Plan) -> None:
    """Refuse what is in `model`, all of it at once, where `plan` cannot be equal to one device."""
    errors = [
        *_form_errors(model, plan),
        *_lookup_errors(model, plan),
        *_iteration_errors(model, plan),
        *_adapter_errors(model, plan),
        *_gate_loss_errors(model, plan),
    ]
    raise_errors(f"the model with plan '{plan}'", errors)


def _wrapper_errors(model: nn.Module) -> Iterator[str]:
    """Modules that communicate or compute by themselves."""
    for name, module in model.named_modules():
        kind, place = type(module).__name__, f"{name or 'the model'} is a"
        if isinstance(module, DataParallel | DistributedDataParallel):
            yield (
                f"{place} {kind}, which divides the batch by itself: give the model as it was before, and "
                "let the plan say data=N"
            )
        elif isinstance(module, torch.jit.ScriptModule):
            yield (
                f"{place} {kind}, whose forward no plan can change: give the nn.Module that it was made of, "
                "and compile=true in the plan to compile it"
            )


def _form_errors(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Yield errors of weights without a shape, of a type that the plan lacks, or divided already."""
    lazy = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer)
    ]
    if lazy:
        yield (
            f"{', '.join(lazy)}: of a lazy module, and without a shape until it is called; call the model "
            "once, with a batch of any size, before you give it to parallelize"
        )
    is_low = plan.precision not in ("fp32", "fp64")
    mixed = [name for name, p in model.named_parameters() if is_low and p.is_complex()]
    if mixed:
        yield (
            f"{', '.join(mixed)}: complex, and precision={plan.precision} has no complex numbers; use "
            "precision=fp32"
        )
    yield from _sparse_errors(model, plan)
    yield from _quantised_errors(model, plan)
    divided = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if divided:
        yield (
            f"{divided[0]} and {len(divided) - 1} others are DTensors: the model is divided already "
            "(fully_shard, parallelize_module); give it as it was before, and let the plan divide it"
        )


def _sparse_errors(model: nn.Module, plan: Plan) -> Iterator[str]:
    sparse = [name for name, buffer in model.named_buffers() if buffer.layout != torch.strided]
    if sparse and plan.ranks > 1:
        yield (
            f"{', '.join(sparse)}: sparse, and ranks exchange dense buffers alone; use one rank, keep them "
            "dense, or keep them as attributes that are no buffers"
        )
    elif sparse and (saved := sorted(model.state_dict(keep_vars=True).keys() & sparse)):
        yield (
            f"{', '.join(saved)}: sparse, and checkpoints have dense tensors alone; register what never "
            "changes with persistent=False, or keep it dense"
        )


def _quantised_errors(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Yield an error for weights that are more than one tensor, where no rank could have a part of them."""
    parameters = dict(model.named_parameters())
    packed = [name for name, p in parameters.items() if is_packed(p)]
    several = [
        name
        for name, p in parameters.items()
        if hasattr(type(p), "__tensor_flatten__") and not isinstance(p, DTensor)
    ]
    if several:
        yield (
            f"{several[0]} and {len(several) - 1} others are {type(parameters[several[0]]).__name__}: of a "
            "class that is several tensors, which no message between ranks carries; quantise with "
            "bitsandbytes, or train an adapter of the weights as they were"
        )
    if packed and (plan.frees_weights or plan.ranks > plan.data):
        yield (
            f"{packed[0]} and {len(packed) - 1} others are {type(parameters[packed[0]]).__name__}: packed "
            "numbers whose scales are outside of all parameters, so a rank cannot hold a part of them; use "
            "data with zero=0, 1 or 2"
        )


def _lookup_errors(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Embeddings that change their weights in the forward, or whose gradients depend on the whole batch."""
    users = Counter(id(p) for each in model.modules() for p in each._parameters.values())
    for name, module in model.named_modules():
        if not isinstance(module, _Lookup):
            continue
        if module.scale_grad_by_freq and is_cut(plan):
            yield (
                f"{name} has scale_grad_by_freq: its gradients depend on how often the whole batch uses a "
                "row, and a rank sees a part of it; use data=1, microbatches=1 and context=1, or drop it"
            )
        if module.max_norm is not None and not _may_renormalise(users[id(module.weight)], plan):
            yield (
                f"{name} has max_norm: its forward changes the rows that it uses, and ranks with other rows "
                "would drift apart; use data=1, context=1, microbatches=1, zero=0 and fp32, with "
                "pipeline=1 if other modules have the weight, or drop it and clip the rows between steps"
            )


def _may_renormalise(users: int, plan: Plan) -> bool:
    """Return whether a forward changes the same rows as on one device: no other rank, stage or microbatch
    uses them (a head may read the weight too), and what is changed stays."""
    is_alone = not is_cut(plan) and plan.tensor == 1 and (plan.pipeline == 1 or users == 1)
    stays = plan.zero == 0 and not plan.frees_weights and plan.precision in ("fp32", "fp64")
    return is_alone and stays and plan.flushes


def _iteration_errors(model: nn.Module, plan: Plan) -> Iterator[str]:
    if plan.schedule != "pipedream-2bw" or plan.microbatches == 1:
        return
    for name, module in model.named_modules():
        if iterated_modules(module, recurse=False):
            yield (
                f"{name or 'the model'} has a spectral norm, which iterates in every forward: with "
                "schedule=pipedream-2bw no microbatch is the first of an update; use another schedule"
            )


def _adapter_errors(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Yield an error for adapters of peft that are no layers, where the plan must split the model inside; and
    for those that exchange parameters in the forward."""
    inside = plan.pipeline != 1 or plan.tensor > 1 or plan.context > 1
    reason = reason_not_passed_on(model) if inside else ""
    if reason:
        yield f"the model: {reason}"
    exchanging = [name for name, module in model.named_modules() if exchanges_parameter(module)]
    if exchanging and (plan.ranks > 1 or is_cut(plan)):
        yield (
            f"{exchanging[0]}: peft puts another tensor in the place of its parameter in every forward "
            "(target_parameters), and what a plan has done with the parameter would be lost; adapt modules "
            "(target_modules), or use one rank and one microbatch"
        )


def _gate_loss_errors(model: nn.Module, plan: Plan) -> Iterator[str]:
    """transformers' balancing losses, which are those of a whole batch only in a call that sees all of it."""
    if not is_cut(plan):
        return
    for name, module in model.named_modules():
        coefficients = gate_loss_coefficients(module)
        if coefficients:
            values = ", ".join(f"{key}={value:g}" for key, value in coefficients.items())
            yield (
                f"{name or 'the model'} has output_router_logits=True and {values}: the loss that "
                f"{type(module).__name__} adds for its gates is not a mean over samples, and with "
                f"data={plan.data}, microbatches={plan.microbatches} and context={plan.context} a call sees "
                f"a part of the batch; set model.config.output_router_logits=False or "
                f"{' and '.join(f'model.{key}=0' for key in coefficients)}, use data=1, microbatches=1 and "
                "context=1, or build the model with gates of echelon.experts, whose losses are those of the "
                "global batch"
            )
