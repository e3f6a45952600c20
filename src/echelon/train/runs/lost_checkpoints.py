"""A run that had saved its state, and has none any more: to begin again in its folder would be a surprise.

A run that was killed before its first checkpoint was whole begins again.
"""

from pathlib import Path

from echelon.launching.torchrun import is_under_torchrun
from echelon.train.jobs.job import Job
from echelon.train.metrics_file import METRICS, last_step
from echelon.train.runs.memory_copies import has_copies, is_in_memory
from echelon.train.runs.run_state import FINISHED, PREEMPTED


def lost_errors(path: Path, state: str, began: Job, job: Job) -> list[str]:
    """Of a run without a checkpoint on disk: one if it had saved one and none is in memory either."""
    steps = began.steps if state == FINISHED else last_step(path / METRICS)
    if not _had_saved(state, steps, began) or _may_be_in_memory(path, job):
        return []
    again = "" if state == FINISHED else f", or remove {path / METRICS} to train this one from step 1 again"
    return [
        f"the run has made {steps} steps and has saved its state, but there is no checkpoint in "
        f"{path / 'checkpoints'}, and no copy in memory; put the checkpoints back, or train a new run "
        f"without --resume{again}"
    ]


def _had_saved(state: str, steps: int, job: Job) -> bool:
    """Whether a save is certainly whole: it is when the next one begins, which is before the step after."""
    if state == FINISHED:
        return True
    return steps > 0 and (state == PREEMPTED or 0 < 2 * job.save_every < steps)


def _may_be_in_memory(path: Path, job: Job) -> bool:
    """Under torchrun another host may have the copies, and only ranks can use them."""
    return is_in_memory(job) if is_under_torchrun() else has_copies(job, path)
