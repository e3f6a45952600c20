"""`--resume`: which run goes on, and with which job.

The job is that of the run, in its run.json. The plan may change, and what does not change what is trained.
"""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from echelon.errors import UserError, raise_errors
from echelon.launching.torchrun import is_under_torchrun
from echelon.planner.searching.request import is_request
from echelon.state.checkpoint.folder import RUN_FILE, find_run
from echelon.train.checkpoints import has_copies, is_in_memory, newest_step
from echelon.train.events import METRICS, last_step
from echelon.train.jobs.job import Job, as_plain, flat
from echelon.train.jobs.job_file import read_job, read_values
from echelon.train.runs.run_folder import FINISHED, PREEMPTED, link_errors, read_about

MAY_CHANGE = (
    *("plan", "steps", "save_every", "keep", "keep_every", "restarts", "audit", "trace", "track"),
    *("evaluate_every", "evaluate_batches"),
    *("nonfinite", "most_skipped", "spike_factor", "spike_window", "max_rollbacks"),
)


class Continued(NamedTuple):
    path: Path
    job: Job


def resume(given: Path | None, settings: Sequence[str], plan: str | None) -> Continued:
    """The run in the folder `given`; or the newest unfinished one of a job file, or of the embedded job."""
    if given is not None and not given.is_file() and given.suffix != ".toml":
        return _continued(given, _job_of(given, settings, plan))
    job = read_job(given, settings, plan)
    path = _newest(job)
    if plan is None and is_request(job.plan):  # the run goes on with the one that was chosen for it
        job = replace(job, plan=_job_of(path, (), None).plan)
    return _continued(path, job if given is not None else _job_of(path, settings, plan))


def runs_of(job: Job) -> Iterator[Path]:
    """The run folders of a job's name, newest first."""
    folders = [path.parent for path in Path(job.out).glob(f"{glob.escape(job.name)}-*/{RUN_FILE}")]

    def age(path: Path) -> tuple[str, str]:
        return str((read_about(path) or {}).get("started", "")), path.name

    yield from sorted(folders, key=age, reverse=True)


def _newest(job: Job) -> Path:
    states = {path: (read_about(path) or {}).get("state") for path in runs_of(job)}
    unfinished = [path for path, state in states.items() if state not in (None, FINISHED)]
    if unfinished:
        return unfinished[0]
    where = f"{job.out}/{job.name}-*"
    if states:
        raise UserError(
            f"--resume: every run in {where} has finished; to train one for longer, give its folder and more "
            f"steps: --resume {next(iter(states))} --set steps=N"
        )
    raise UserError(
        f"--resume: there is no run in {where}; give its folder, or its job file, or --set out=FOLDER"
    )


def _job_of(path: Path, settings: Sequence[str], plan: str | None) -> Job:
    about = read_about(path)
    if about is None or not isinstance(about.get("job"), dict):
        raise UserError(f"--resume {path}: {_why_no_job(path)}")
    return read_values(about["job"], settings, plan, str(path / RUN_FILE))


def _why_no_job(path: Path) -> str:
    run = find_run(path) if path.exists() else None
    if run is None:
        return (
            f"is not the folder of a run: it must have a {RUN_FILE} with the job; "
            "give a folder like runs/train-20300102-030405"
        )
    if run != path.absolute():
        return f"is a part of a run; give its folder: --resume {run}"
    return (
        f"its {RUN_FILE} is damaged, or this user may not read it: it must be a JSON object with the job; "
        "put it back from a copy, or train a new run"
    )


def _continued(path: Path, job: Job) -> Continued:
    """The run with its job, if it may go on so; else one UserError with every reason."""
    about = read_about(path) or {}
    began = _job_of(path, (), None)
    saved = newest_step(job, path)
    errors = [*_changes(began, job), *link_errors(path)]
    if about.get("state") == FINISHED and job.steps <= began.steps:
        errors.append(
            f"the run has finished, after {began.steps} steps; to train it for longer, set more: "
            f"--set steps={2 * began.steps}"
        )
    elif job.steps < saved:
        errors.append(
            f"steps={job.steps}: the run has a checkpoint of step {saved}; set steps={saved} or more"
        )
    if not saved and not errors:
        errors += lost_errors(path, str(about.get("state")), began, job)
    raise_errors(f"--resume {path}", errors)
    return Continued(path, job)


def _changes(before: Job, after: Job) -> list[str]:
    """An error for each key that would change what the run has trained so far."""
    old, new = flat(as_plain(before)), flat(as_plain(after))
    return [
        f"{key}={_show(new.get(key))}: the run has {key}={_show(old.get(key))}, and cannot go on with "
        "another; leave it out, or train a new run"
        for key in dict.fromkeys([*old, *new])
        if key not in MAY_CHANGE and old.get(key) != new.get(key)
    ]


def _show(value: Any) -> str:
    return "–" if value is None else str(value)


def lost_errors(path: Path, state: str, began: Job, job: Job) -> list[str]:
    """Return the error of a run that has saved its state, and has none on disk or in memory any more: to
    begin again in its folder would be a surprise."""
    steps = began.steps if state == FINISHED else last_step(path / METRICS)
    # A save is certainly whole when the next one begins, which is before the step after.
    is_saved = steps > 0 and (state == PREEMPTED or 0 < 2 * began.save_every < steps)
    if not is_saved and state != FINISHED:
        return []
    # Under torchrun another host may have the copies, and only ranks can use them.
    if is_in_memory(job) if is_under_torchrun() else has_copies(job, path):
        return []
    again = "" if state == FINISHED else f", or remove {path / METRICS} to train this one from step 1 again"
    return [
        f"the run has made {steps} steps and has saved its state, but there is no checkpoint in "
        f"{path / 'checkpoints'}, and no copy in memory; put the checkpoints back, or train a new run "
        f"without --resume{again}"
    ]
