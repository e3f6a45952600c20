"""The rules of a job for numbers that go wrong: steps that are not finite, and losses that jump."""

import math
from typing import TYPE_CHECKING

from echelon.plan import Plan
from echelon.train.runs.findings import Findings
from echelon.update.nonfinite import why_unskippable

if TYPE_CHECKING:
    from echelon.train.jobs.job import Job

CHOICES = ("skip", "stop")


def check_numbers(job: "Job", plan: Plan | None, findings: Findings) -> None:
    """`plan`: if it is valid."""
    if job.nonfinite not in (None, *CHOICES):
        findings.add(f"nonfinite={job.nonfinite!r}: must be one of {', '.join(CHOICES)}", "nonfinite")
    reason = why_unskippable(plan) if plan is not None else None
    if reason is not None and job.nonfinite == "skip":
        findings.add(f"nonfinite=skip {reason}, or nonfinite=stop", "nonfinite")
    factor = job.spike_factor
    if factor != 0 and not 1 < factor < math.inf:
        findings.add(f"spike_factor={factor}: must be a number above 1, or 0 for none", "spike_factor")
    if factor and findings.all_valid("spike_factor", "save_every"):
        _check_rollbacks(job, plan, findings)


def _check_rollbacks(job: "Job", plan: Plan | None, findings: Findings) -> None:
    if job.save_every == 0:
        findings.add(
            f"spike_factor={job.spike_factor} save_every=0: after a spike training goes back to a "
            "checkpoint, and none is saved before the end; set save_every=100, or spike_factor=0",
            "spike_factor",
        )
    if plan is not None and plan.sync == "async":
        findings.add(
            f"spike_factor={job.spike_factor} sync=async: workers see losses of their own, and cannot go "
            "back together; use sync=all-reduce, or spike_factor=0",
            "spike_factor",
        )
