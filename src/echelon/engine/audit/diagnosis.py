"""Why the gradients of a plan are not those of one device, in words for the user.

Rank 0 runs the plain model once more, on the parts into which the plan cuts the batch. Where these give other
gradients than all samples together, the cut is the cause: of the outputs, of the loss, or of a backward pass
that mixes samples. Else it is what the plan does inside of the model.
"""

from collections.abc import Sequence
from functools import partial

import torch

from echelon.engine.audit.audit_batch import AuditBatch
from echelon.engine.audit.gradient_comparison import TOLERANCES, Difference, KeptGradients
from echelon.engine.audit.one_device import FailedRunError, OneDevice
from echelon.engine.audit.reference import Result, Run
from echelon.nn.batch import tensors_of
from echelon.plan import Plan

_NAMED = 3


def explain(
    found: Sequence[Difference], run: Run, whole: Result, samples: AuditBatch, device: OneDevice, plan: Plan
) -> str:
    """Write the error for the user, on rank 0. `found`: the parameters whose gradients differ by more than
    rounding; `whole`: of `run`."""
    head = (
        f"plan '{plan}': step {run.step + 1} would not train as on one device. For {samples.bounds[-1][1]} "
        f"samples of its batch, {_described(found, device.reference.form.order)}"
    )
    cause = ""
    if len(samples.bounds) > 1:
        try:
            cause = _cause_in_cut(run, whole, samples, device, [each.name for each in found])
        except FailedRunError as error:
            cause = f" A part of the batch alone raises {error}"
    return head + (cause or _cause_in_plan(plan)) + "; audit='off' trains without this comparison"


def _described(found: Sequence[Difference], order: Sequence[str]) -> str:
    """Backward passes go from the last parameters to the first: the last one is next to the cause."""
    last = max(found, key=lambda each: order.index(each.name)).name
    worst = sorted(found, key=lambda each: -each.relative)[:_NAMED]
    texts = [
        f"{each.name} by {each.relative:.2g} of its norm" if each.norm else f"{each.name} where it has none"
        for each in worst
    ]
    return f"gradients differ from {last} backward, {len(found)} in all: {', '.join(texts)}."


def _cause_in_cut(
    run: Run, whole: Result, samples: AuditBatch, device: OneDevice, names: Sequence[str]
) -> str:
    summed = KeptGradients(device.group)
    of_part = partial(run._replace, scale=1.0, is_total=True, all_samples=samples.bounds[-1][1])
    parts = [
        device.gradients(of_part(batch=samples.part(number), place=begin), summed.take, names)
        for number, (begin, _) in enumerate(samples.bounds)
    ]
    count = sum(part.counted for part in parts)
    comparison = summed.comparison(1 / count if count else 0.0)
    device.gradients(run, comparison.take, names)
    tolerance = TOLERANCES[device.reference.dtype]
    if all(each.relative <= tolerance for each in comparison.differences(device.group)):
        return ""
    sample = _first_mixed(whole, parts, samples, tolerance)
    if sample is not None:
        return (
            f" The model mixes samples: its output for sample {sample} is another when only "
            f"{samples.per_part} of them are computed together (a mean, norm, softmax or sort over dim 0, "
            "the size of the batch, or something kept from call to call); let forward compute each sample "
            "by itself, or see all of them with echelon.gather_samples, or use data=1 and microbatches=1"
        )
    mean, of_parts = whole.total / whole.counted, sum(part.total for part in parts) / count
    if abs(mean - of_parts) > tolerance * max(abs(mean), abs(of_parts)) or whole.counted != count:
        return (
            f" The loss does not add up over samples: it is {mean:.6g} for all of them, and the mean over "
            f"parts is {of_parts:.6g} (it is a mean over what it counts, as targets that are not masked or "
            "weights of classes, or it compares samples); return (total, count), the sum and what it is the "
            "sum of, or echelon.Sum(total), or compare samples of echelon.gather_samples, or use data=1 and "
            "microbatches=1"
        )
    return (
        " The backward pass mixes samples: outputs and losses of parts are right, and gradients are not (an "
        "autograd.Function or a hook that computes over dim 0, or clips, or a second loss by autograd.grad); "
        "let it treat each sample by itself, or use data=1 and microbatches=1"
    )


def _first_mixed(whole: Result, parts: Sequence[Result], samples: AuditBatch, tolerance: float) -> int | None:
    leaves = tensors_of(whole.output)
    for (begin, end), part in zip(samples.bounds, parts, strict=True):
        of_part = tensors_of(part.output)
        if len(of_part) != len(leaves):
            return begin
        for leaf, own in zip(leaves, of_part, strict=True):
            if leaf.dim() == 0 or len(leaf) != samples.bounds[-1][1] or not leaf.is_floating_point():
                continue
            one, other = leaf[begin:end].double(), own.double()
            if one.shape != other.shape:
                return begin
            gap = torch.where((one == other) | (one.isnan() & other.isnan()), 0, one - other)
            if gap.nan_to_num(torch.inf).norm() > tolerance * one.nan_to_num().norm():
                return begin
    return None


def _cause_in_plan(plan: Plan) -> str:
    causes = []
    if plan.stages > 1 or plan.schedule_is_file or plan.sequence or plan.context > 1:
        causes.append(
            "layers() is not what forward does (a step between layers, a loss that is kept on a module and "
            "read from another stage, a detach)"
        )
    if plan.context > 1:
        causes.append(
            "the loss does not add up over the positions of a sequence, which ranks share (return (total, "
            "count) of the targets that count; to predict the next token, shift targets before you pass the "
            "batch, and not in the loss)"
        )
    if plan.tensor > 1:
        causes.append("tensor_table splits a module whose matrix is used otherwise than as a product")
    if plan.expert > 1:
        causes.append("experts are called otherwise than by their gate")
    causes.append("a hook on a weight is not linear, or a loss or forward calls backward() by itself")
    causes.append("a forward draws numbers, or keeps something from call to call, as no rank can repeat it")
    return f" Likely causes: {'; '.join(causes)}"
