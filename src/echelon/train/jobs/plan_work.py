"""Plans whose steps have more work than can be scheduled."""

from echelon.plan import AUTO, Plan

MOST_WORK = 10**6  # forwards of a pipeline's step


def work_error(plan: Plan) -> str | None:
    """An error if a step of the pipeline has so many forwards that its program cannot be made."""
    if plan.pipeline == AUTO or plan.stages == 1:
        return None
    forwards = plan.stages * plan.chunks * plan.microbatches
    if forwards <= MOST_WORK:
        return None
    return (
        f"plan '{plan}': a step has {forwards:,} forwards (stages × chunks × microbatches), and at most "
        f"{MOST_WORK:,} can be scheduled; use fewer microbatches"
    )
