"""A training that diverged ends, and says what to change."""

import math

from echelon.errors import UserError
from echelon.train.jobs.job import Job


def refuse_divergence(job: Job, step: int, **numbers: float) -> None:
    """Raise a UserError where one of `numbers` (loss=…, gradient_norm=…) of `step` is not finite."""
    for name, value in numbers.items():
        if not math.isfinite(value):
            became = "NaN" if math.isnan(value) else "infinite"
            raise UserError(f"the {name.replace('_', ' ')} became {became} at step {step}; {_fixes(job)}")


def _fixes(job: Job) -> str:
    optimizer = job.optimizer
    clip = (
        "set optimizer.clip=1.0" if optimizer.clip is None else f"lower optimizer.clip (now {optimizer.clip})"
    )
    return (
        f"lower optimizer.learning_rate (now {optimizer.learning_rate}), or {clip}, "
        f"or raise optimizer.warmup (now {job.warmup} steps)"
    )
