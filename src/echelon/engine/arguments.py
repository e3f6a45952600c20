"""The arguments that users give the engine, validated up front: all errors at once, each with the fix.

The types say the same, but who trains rarely runs a type checker; without this, a mistake shows as an error
deep in autograd, or as a training that learns nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.engine.audit import MODES
from echelon.engine.saving.restore import check_whole
from echelon.errors import UserError, raise_errors
from echelon.plan import AUTO, Plan
from echelon.planner.searching.request import Request, is_request
from echelon.update.precision.loss_scaling import loss_scale_errors


def check_arguments(
    model: object,
    plan: object,
    optimizer: object,
    loss: object,
    clip: object,
    prefetch: object,
    seed: object = 0,
    boundaries: object = None,
    tensor_table: object = None,
    weights: object = None,
    layers: object = None,
    audit: object = "sampled",
    check_every: object = 0,
) -> None:
    """Refuse what `parallelize` cannot work with."""
    errors = [
        *_object_errors(model, plan, optimizer, loss),
        *_number_errors(clip, prefetch, seed),
        *_boundary_errors(boundaries, plan),
        *_choice_errors(tensor_table, weights, layers, audit, check_every),
    ]
    raise_errors("the arguments of parallelize", errors)


def check_objective(objective: object, loss: object, plan: Plan | str) -> None:
    """Refuse an objective beside a loss, or where no rank can run the whole model."""
    if objective is None:
        return
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    errors = []
    if not callable(objective):
        errors.append(
            f"objective is a {type(objective).__name__}: must be a function (model, batch) -> mean, "
            "(total, count) or echelon.Sum(total)"
        )
    if loss is not None:
        errors.append("objective and loss: the objective computes the loss itself; drop one of them")
    if plan.stages > 1 or plan.context > 1 or plan.sequence:
        errors.append(
            f"objective with plan '{plan}': it calls the whole model, and with pipeline, context or sequence "
            "a rank runs a part of its layers; give a loss(output, target), or use data, zero and tensor"
        )
    raise_errors("the arguments of parallelize", errors)


def check_resident_bytes(resident_bytes: object, plan: Plan | str) -> None:
    """Refuse what is no number of bytes, or is about nothing in this plan."""
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    errors = []
    if not _is_count(resident_bytes):
        errors.append(f"resident_bytes={resident_bytes!r}: must be a number of bytes, at least 0")
    elif resident_bytes and "parameters" not in plan.offload:
        errors.append(
            f"resident_bytes={resident_bytes} with plan '{plan}': it says how much offload=parameters leaves "
            "on the device; add offload=parameters, or drop resident_bytes"
        )
    raise_errors("the arguments of parallelize", errors)


def check_average(average: float | None, plan: Plan) -> float | None:
    """Return it; refuse what is no decay of an average, or a plan without common updates."""
    errors = []
    is_decay = isinstance(average, Real) and not isinstance(average, bool) and 0 < float(average) < 1
    if average is not None and not is_decay:
        errors.append(
            f"average={average!r}: must be a number above 0 and below 1, as 0.9999, or None for none"
        )
    elif average is not None and plan.sync == "async":
        errors.append(
            f"average={average} sync=async: a server makes versions of the weights, each from the work of "
            "some workers; drop average, or use sync=all-reduce"
        )
    raise_errors("the arguments of parallelize", errors)
    return average


def _object_errors(model: object, plan: object, optimizer: object, loss: object) -> Iterator[str]:
    """A class in the place of an object, or what was made already, is a common mistake."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        yield f"model={model.__name__}: is a class; give a model, like {model.__name__}(…)"
    elif not isinstance(model, nn.Module):
        yield f"model is a {type(model).__name__}: must be a torch.nn.Module"
    yield from _plan_errors(plan)
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.Optimizer):
        yield (
            f"optimizer is a finished {kind}: must be a function, because a rank may hold only a part of the "
            f"parameters; write optimizer=lambda params: {kind}(params)"
        )
    elif not callable(optimizer):
        yield (
            f"optimizer is a {kind}: must be a function from parameters to an optimizer, like lambda params: "
            "AdamW(params)"
        )
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        yield f"loss={loss.__name__}: is a class; give a loss, like {loss.__name__}()"
    elif loss is not None and not callable(loss):
        yield (
            f"loss is a {type(loss).__name__}: must be a function (output, target) -> mean, or None for the "
            "loss that the model returns"
        )


def _plan_errors(plan: object) -> list[str]:
    if isinstance(plan, Plan):
        return []
    if not isinstance(plan, str):
        return [f"plan is a {type(plan).__name__}: must be an echelon.Plan or its text, like 'data=2'"]
    try:
        _ = Request.parse(plan) if is_request(plan) else Plan.parse(plan)
    except UserError as refusal:
        return [f"plan: {error}" for error in refusal.errors]
    return []


def _number_errors(clip: object, prefetch: object, seed: object) -> Iterator[str]:
    if clip is not None and not (isinstance(clip, Real) and not isinstance(clip, bool) and float(clip) > 0):
        yield f"clip={clip!r}: must be a number above 0, or None for no clipping"
    if not _is_count(prefetch):
        yield f"prefetch={prefetch!r}: must be an integer, at least 0"
    if seed is not None and not _is_integer(seed):
        yield f"seed={seed!r}: must be an integer, or None to leave dropout to torch"


def _boundary_errors(boundaries: Any, plan: Any) -> list[str]:
    if boundaries is None:
        return []
    listed = isinstance(boundaries, Sequence) and not isinstance(boundaries, str)
    if not listed or not all(map(_is_integer, boundaries)):
        return [f"boundaries={boundaries!r}: must be a list of integers, like [3, 6], or None"]
    if not boundaries or _plan_errors(plan):
        return []
    if is_request(plan):
        return [f"boundaries={list(boundaries)} with plan '{plan}': it chooses the stages too; drop them"]
    pipeline = (Plan.parse(plan) if isinstance(plan, str) else plan).pipeline
    if pipeline not in (1, AUTO):
        return []
    return [
        f"boundaries={list(boundaries)} with pipeline={pipeline}: they say where the stages of a plan begin; "
        f"drop them, or set pipeline={len(boundaries) + 1}"
    ]


def _choice_errors(
    table: object, weights: object, layers: object, audit: object, check_every: object
) -> Iterator[str]:
    rule = "must map names of modules to words, like {'blocks.*.up': 'column'}"
    if isinstance(table, Mapping):
        for name, word in table.items():
            if not isinstance(name, str) or not isinstance(word, str):
                yield f"tensor_table has {name!r}: {word!r}, and {rule}"
    elif table is not None:
        yield f"tensor_table is a {type(table).__name__}: {rule}"
    if weights is not None and not isinstance(weights, str | Path):
        yield f"weights is a {type(weights).__name__}: must be a folder with a model in Hugging Face's files"
    named = layers if isinstance(layers, list | tuple) else [layers]
    if layers is not None and not (named and all(isinstance(path, str) for path in named)):
        yield f"layers={layers!r}: must be the name of a list in the model, like 'transformer.h', or several"
    if audit not in MODES:
        yield f"audit={audit!r}: must be one of {', '.join(map(repr, MODES))}"
    if not _is_count(check_every):
        yield f"check_every={check_every!r}: must be a number of steps, or 0 to compare never"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is_integer(value) and value >= 0


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_model(model: nn.Module, plan: Plan, clip: float | None, loss_scale: object = None) -> None:
    """Refuse a model that this rank has in parts, or in which nothing learns; a clip without a norm, or a
    loss scale without fp16."""
    if clip is not None and not plan.flushes:
        raise UserError(
            f"clip={clip} schedule={plan.schedule}: clipping needs the norm over all stages, which never "
            "stand at the same update there; drop clip, or use schedule=1f1b"
        )
    if clip is not None and plan.update != "step":
        raise UserError(
            f"clip={clip} with update={plan.update}: the norm of all gradients is known when the first units "
            "are updated already; drop clip, or use update=step"
        )
    raise_errors("the arguments of parallelize", loss_scale_errors(loss_scale, plan.precision))
    check_whole(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("the model has no parameter that requires a gradient; there is nothing to train")


def check_optimizer(optimizer: object, parameters: Iterable[nn.Parameter], *, whole: bool = True) -> None:
    """Refuse what the user's function made of `parameters`, where it cannot train them. Of a part of the
    model (not `whole`) it may leave out everything."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"the optimizer function returned a {type(optimizer).__name__}: it must return a "
            "torch.optim.Optimizer, like lambda params: AdamW(params)"
        )
    errors = _membership_errors(optimizer, {id(parameter) for parameter in parameters}, whole)
    if isinstance(optimizer, torch.optim.LBFGS):
        errors.append("LBFGS calls the model itself, many times per step: use an optimizer without a closure")
    raise_errors(f"the optimizer {type(optimizer).__name__}", errors)


def _membership_errors(optimizer: torch.optim.Optimizer, given: set[int], whole: bool) -> list[str]:
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    unknown = sum(each not in given for each in held)
    errors = []
    if unknown:
        errors.append(
            f"{unknown} of its {len(held)} parameters are not those that the function was given: it would "
            "not train this model; write lambda params: AdamW(params), and use params"
        )
    elif not held and whole:
        errors.append("it leaves out every parameter that it was given: nothing would be trained; add some")
    return errors
