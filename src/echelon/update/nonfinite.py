"""The rule for a step whose loss, or whose gradients, are NaN or infinite.

    allow   the step is made, as torch would make it (fp16 skips those whose gradients have overflowed)
    skip    the step changes nothing, on all ranks; too many of them in a row are an error
    stop    the first such step is that error, and changes nothing either

The error names the first layer that is not finite: engine/step/nonfinite_search.py.
"""

from numbers import Integral
from typing import Literal, NamedTuple, cast, get_args

from echelon.errors import UserError, raise_errors
from echelon.plan import Plan

Nonfinite = Literal["allow", "skip", "stop"]
CHOICES: tuple[Nonfinite, ...] = get_args(Nonfinite)
MOST_SKIPPED = 10


class NonfiniteError(UserError):
    """Too many steps in a row were not finite. None of them has changed anything."""

    count: int = 0
    step: int = -1  # the number of the last of them, from 0
    reason: str = ""

    @classmethod
    def of(cls, count: int, step: int, found: str = "") -> "NonfiniteError":
        """`found`: what is known of the last of them. People count steps from 1."""
        steps = f"{count} steps in a row, of which the last was " if count > 1 else ""
        reason = f"the loss or the gradients were not finite in {steps}step {step + 1}"
        error = cls(
            f"{reason}; no weight has changed; {found + '; ' if found else ''}lower the learning rate, set "
            "clip, or look at the batches"
        )
        error.count, error.step, error.reason = count, step, reason
        return error


class NonfiniteRule(NamedTuple):
    """`most_skipped`: how many steps in a row are an error; None where steps are not skipped."""

    most_skipped: int | None = None

    @property
    def skips(self) -> bool:
        return self.most_skipped is not None

    @classmethod
    def of(cls, choice: str, most_skipped: int, plan: Plan) -> "NonfiniteRule":
        """The rule of a plan, if it can have it."""
        raise_errors("the arguments of parallelize", nonfinite_errors(choice, most_skipped, plan))
        limits: dict[Nonfinite, int | None] = {"allow": None, "skip": most_skipped, "stop": 1}
        return cls(limits[cast(Nonfinite, choice)])


def nonfinite_errors(choice: object, most_skipped: object, plan: Plan | None) -> list[str]:
    """Why a training cannot treat its steps so. `plan`: if it is known."""
    errors = []
    if choice not in CHOICES:
        errors.append(f"nonfinite={choice!r}: must be one of {', '.join(CHOICES)}")
    if not isinstance(most_skipped, Integral) or isinstance(most_skipped, bool) or most_skipped < 1:
        errors.append(f"most_skipped={most_skipped!r}: must be a number of steps, at least 1")
    if plan is not None and choice in ("skip", "stop"):
        reason = why_unskippable(plan)
        if reason is not None:
            errors.append(f"nonfinite={choice} {reason}, or nonfinite=allow")
    return errors


def why_unskippable(plan: Plan) -> str | None:
    """Why a plan cannot leave out a step as a whole, and what to do; None where it can."""
    if plan.update != "step":
        return (
            f"update={plan.update}: units are updated in the backward pass, before it is known whether all "
            "gradients of the step are finite; use update=step"
        )
    if plan.sync == "async":
        return (
            "sync=async: workers push gradients at times of their own, and no step of all workers exists "
            "that could be left out; use sync=all-reduce"
        )
    if not plan.flushes:
        return (
            f"schedule={plan.schedule}: stages update at times of their own, some of them before the others "
            "know that a microbatch is not finite; use schedule=1f1b"
        )
    return None
