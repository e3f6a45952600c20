"""`minutes`: a training that ends by time. After its first steps rank 0 counts how many fit, for all ranks.

    minutes = 1.5     steps 1 … 10 at full speed, the last ones 0.7 s each     so 118 of 600 steps

Then it is a training of so many steps: the learning rate falls to its floor with the last one; run.json
has the number, so that a restart and --resume go on with it. Minutes are those of steps, not of what comes
before the first one and after the last.
"""

import dataclasses
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, final

from echelon.collectives.agreement import agree_on_every_rank
from echelon.train.jobs.job import MEASURED_STEPS, Job
from echelon.train.runs.run_folder import read_about

_TYPICAL = 5  # of the measured steps, the last ones: the first ones are audited, and measure memory
_SHARE = 0.9  # of the time for steps; the rest is for validations, checkpoints and later audits


def limited_job(job: Job, folder: Path) -> Job:
    """The job with as many steps as were counted for this run before, if they were; the same on all ranks."""
    if job.minutes is None:
        return job
    steps = agree_on_every_rank(lambda: None, lambda _: _known_steps(folder))
    return job if steps is None else with_steps(job, int(steps))


def with_steps(job: Job, steps: int) -> Job:
    """The warm-up stays: the first steps of it are made."""
    optimizer = dataclasses.replace(job.optimizer, warmup=job.warmup)
    return dataclasses.replace(job, steps=steps, minutes=None, optimizer=optimizer)


def _known_steps(folder: Path) -> int | None:
    job: Any = (read_about(folder) or {}).get("job")
    if not isinstance(job, dict) or "minutes" in job or not isinstance(job.get("steps"), int):
        return None
    return int(job["steps"])


@final
class TimeLimit:
    """Counts the steps that fit. Made before the first step; all ranks call `after` behind each one."""

    def __init__(self, job: Job, clock: Callable[[], float] = time.monotonic) -> None:
        self._job, self._clock = job, clock
        self._times = [clock()]

    def after(self, step: int) -> int | None:
        """Return how many steps there are in all, when this is known: once."""
        if self._job.minutes is None or len(self._times) > MEASURED_STEPS:
            return None
        self._times.append(self._clock())
        if len(self._times) <= MEASURED_STEPS:
            return None
        return int(agree_on_every_rank(lambda: None, lambda _: self._count(step)))

    def _count(self, step: int) -> int:
        assert self._job.minutes is not None
        last = self._times[-_TYPICAL - 1 :]
        each = median(end - begin for begin, end in pairwise(last))
        left = 60 * self._job.minutes - (self._times[-1] - self._times[0])
        more = int(max(0.0, _SHARE * left) / max(each, 1e-9))
        least = self._job.warmup + (self._job.optimizer.decay or 0)  # of the schedule
        return min(self._job.steps, max(step + more, least))
