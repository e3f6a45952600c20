"""What each plan allows a user to do by hand between steps."""

from collections.abc import Sequence

from echelon.plan import Plan


def calls_as_one_device(plan: Plan) -> bool:
    """Whether a step calls the model's own forward once, with the whole batch, and nothing is computed twice:
    then a hook or another forward does what it does without an engine."""
    is_one = plan.ranks == 1 and plan.microbatches == 1 and plan.stages == 1
    is_plain = plan.recompute == "none" and plan.compress == "none" and not plan.compile
    return is_one and is_plain and not plan.offload and plan.update == "step"


def needs_idle(plan: Plan) -> bool:
    """Whether anything beside the model's own parameters follows from their values."""
    is_low = plan.precision not in ("fp32", "fp64")
    return plan.ranks > 1 or is_low or bool(plan.offload) or not plan.flushes


def updates_itself(plan: Plan) -> bool:
    """Whether `optimizer.step()` by hand is the update of one device: the optimizer has the model's own
    parameters, all of them, and their gradients are those of the batch."""
    return not needs_idle(plan) and plan.update == "step"


def lost_gradient(plan: Plan) -> str | None:
    """What to tell those who use a gradient after a step, where it is not there whole."""
    is_part = plan.zero > 0 or plan.tensor > 1 or plan.expert > 1 or plan.stages > 1
    is_gone = plan.update != "step" or "parameters" in plan.offload or plan.sync == "async"
    if plan.ranks == 1 and not is_gone:
        return None
    if not (is_part or is_gone):
        return None
    return (
        f"with plan '{plan}' no rank has it whole after a step, and the update is made already; the norm is "
        "engine.step(…).grad_norm, and parallelize(clip=…) clips it"
    )


def changed_weight_error(
    plan: Plan, changed: Sequence[str], split: Sequence[str], *, is_empty: bool
) -> str | None:
    """Why weights that were changed by hand cannot be taken over, if they cannot."""
    names = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    fix = (
        "make the change before parallelize, after engine.close(), or in a checkpoint that engine.load reads"
    )
    if plan.sync == "async":
        return (
            f"{names}: changed by hand, and with sync=async the server's weights come before each step; {fix}"
        )
    if not plan.flushes and not is_empty:
        return (
            f"{names}: changed by hand while microbatches of older weights are under way "
            f"(schedule={plan.schedule}); call engine.synchronize() before the change"
        )
    if plan.stages > 1:
        return (
            f"{names}: changed by hand, and with pipeline={plan.pipeline} a rank sees the weights of its own "
            f"stage alone, so that the change may not be the same as on one device; {fix}"
        )
    if split:
        return (
            f"{split[0]}: changed by hand, and with tensor={plan.tensor} expert={plan.expert} this rank has "
            f"a part of it, so that the change may not be the same as on one device; {fix}"
        )
    return None
