"""Rules of when and where weights are updated, and where they stand: update, masters, delay, offload."""

from typing import TYPE_CHECKING

from echelon.plan.fields import FIELDS
from echelon.plan.rule import Rule

if TYPE_CHECKING:
    from echelon.plan.plan import Plan


def _update_in_backward_needs_one_microbatch(plan: "Plan") -> str | None:
    if plan.update != "backward" or plan.microbatches == 1:
        return None
    return (
        f"update=backward microbatches={plan.microbatches}: a gradient that is used and freed in a backward "
        "pass cannot be added to that of the next microbatch; use microbatches=1, or update=last-backward, "
        "which keeps gradients until the last microbatch"
    )


def _update_in_backward_needs_flushed_schedules(plan: "Plan") -> str | None:
    if plan.update == "step" or plan.flushes:
        return None
    return (
        f"update={plan.update} schedule={plan.schedule}: each microbatch is an update of its own, with "
        "weights that other microbatches still need; use update=step, or schedule=1f1b"
    )


def _update_in_backward_needs_all_reduce(plan: "Plan") -> str | None:
    if plan.update == "step" or plan.sync == "all-reduce":
        return None
    return (
        f"update={plan.update} sync={plan.sync}: the server updates all weights when it has all gradients; "
        "use update=step, or sync=all-reduce"
    )


def _update_in_backward_needs_no_loss_scaling(plan: "Plan") -> str | None:
    if plan.update == "step" or plan.precision != "fp16":
        return None
    return (
        f"update={plan.update} precision=fp16: whether gradients have overflowed, and the step is skipped, "
        "is known when all of them are there; use precision=bf16, or update=step"
    )


def _no_masters_need_bf16(plan: "Plan") -> str | None:
    if plan.masters or plan.precision == "bf16":
        return None
    return (
        f"masters=false precision={plan.precision}: it rounds updates of bf16 weights stochastically; use "
        "precision=bf16, or drop masters"
    )


def _no_masters_need_all_reduce(plan: "Plan") -> str | None:
    if plan.masters or plan.sync == "all-reduce":
        return None
    return (
        f"masters=false sync={plan.sync}: only ranks that update their own weights round them; use "
        "sync=all-reduce, or drop masters"
    )


def _delay_needs_offload(plan: "Plan") -> str | None:
    if plan.delay == 0 or "optimizer" in plan.offload:
        return None
    return (
        f"delay={plan.delay} offload={FIELDS['offload'].show(plan.offload) or 'none'}: delay=1 lets the host "
        "update weights while the device computes the next step; add offload=optimizer, or drop delay"
    )


def _delay_needs_whole_updates(plan: "Plan") -> str | None:
    if plan.delay == 0 or plan.update == "step":
        return None
    return (
        f"delay={plan.delay} update={plan.update}: with delay=1 all weights change between two steps, and "
        "update=backward changes them within one; use update=step, or drop delay"
    )


def _offloaded_parameters_need_flushed_schedules(plan: "Plan") -> str | None:
    if "parameters" not in plan.offload or plan.flushes:
        return None
    return (
        f"offload=parameters schedule={plan.schedule}: a stashed weight version must stay until its backward "
        "pass, and offload=parameters drops weights after each use; use schedule=1f1b, or drop offload"
    )


def _offloaded_parameters_need_whole_backwards(plan: "Plan") -> str | None:
    if "parameters" not in plan.offload or plan.schedule != "zero-bubble":
        return None
    return (
        "offload=parameters schedule=zero-bubble: weights are dropped after the backward for inputs, and the "
        "backward for weights comes later; use schedule=1f1b, or drop offload"
    )


def _offloaded_parameters_need_all_reduce(plan: "Plan") -> str | None:
    if "parameters" not in plan.offload or plan.sync == "all-reduce":
        return None
    return (
        f"offload=parameters sync={plan.sync}: the server sends all weights to the device at once; use "
        "sync=all-reduce, or drop offload"
    )


def _host_updates_need_flushed_schedules(plan: "Plan") -> str | None:
    if "optimizer" not in plan.offload or plan.flushes:
        return None
    return (
        f"offload=optimizer schedule={plan.schedule}: each microbatch is an update of its own, and its "
        "weights are needed at once, so nothing hides the way to the host; use schedule=1f1b, or drop "
        "offload=optimizer"
    )


def _host_updates_need_all_reduce(plan: "Plan") -> str | None:
    if "optimizer" not in plan.offload or plan.sync == "all-reduce":
        return None
    return (
        f"offload=optimizer sync={plan.sync}: a server updates the weights, and the optimizer is not on the "
        "ranks that train; use sync=all-reduce, or drop offload=optimizer"
    )


UPDATE_RULES = (
    Rule(_update_in_backward_needs_one_microbatch, ("update", "microbatches")),
    Rule(_update_in_backward_needs_flushed_schedules, ("update", "schedule")),
    Rule(_update_in_backward_needs_all_reduce, ("update", "sync")),
    Rule(_update_in_backward_needs_no_loss_scaling, ("update", "precision")),
    Rule(_no_masters_need_bf16, ("masters", "precision")),
    Rule(_no_masters_need_all_reduce, ("masters", "sync")),
    Rule(_delay_needs_offload, ("delay", "offload")),
    Rule(_delay_needs_whole_updates, ("delay", "update")),
    Rule(_offloaded_parameters_need_flushed_schedules, ("offload", "schedule")),
    Rule(_offloaded_parameters_need_whole_backwards, ("offload", "schedule")),
    Rule(_offloaded_parameters_need_all_reduce, ("offload", "sync")),
    Rule(_host_updates_need_flushed_schedules, ("offload", "schedule")),
    Rule(_host_updates_need_all_reduce, ("offload", "sync")),
)
