"""What is predicted for the job of a run: memory and seconds by the planner, bytes by a dry run."""

import dataclasses
import io
import shlex
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from typing import Any, TypeVar

from echelon.errors import UserError
from echelon.plan import Plan
from echelon.report.run_files import RunFiles, whole
from echelon.train.events import MEASURED_STEP
from echelon.train.jobs.job import Job, as_plain

T = TypeVar("T")
MOST_PARAMETERS = 2 * 10**9  # of a model that is built for a dry run
_NUM_PLANS = 5


def foresee(run: RunFiles) -> dict[str, Any]:
    """{"prediction", "bytes", "plans", "notes"}; what cannot be predicted is missing, and a note says why."""
    found: dict[str, Any] = {"notes": []}
    job = _attempt(found, "the job", lambda: _job_of(run))
    if job is None:
        return found
    found["bytes"] = _attempt(found, "bytes", lambda: _bytes(job, whole(run.measured.get("number"))))
    if job.task != "language":
        note = f"no prediction of seconds and memory: the planner knows no model of {job.task}"
        found["notes"].append(note)
        return found
    cluster = _attempt(found, "seconds and memory", lambda: _cluster(run, job))
    if cluster is None:
        return found
    found["cluster"] = {"name": cluster.device.name, "count": cluster.count}
    found["prediction"] = _attempt(found, "seconds and memory", lambda: _prediction(job, cluster))
    found["plans"] = _attempt(found, "better plans", lambda: _plans(job, cluster))
    return found


def _attempt(found: dict[str, Any], subject: str, ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except (UserError, ValueError, OSError, RuntimeError, NotImplementedError, KeyError) as error:
        found["notes"].append(f"no prediction of {subject}: {str(error) or type(error).__name__}")
        return None


def _job_of(run: RunFiles) -> Job:
    from echelon.train.jobs.job_file import read_values

    values = run.about.get("job")
    if not isinstance(values, dict):
        raise UserError("run.json has no job")
    job = read_values(values, (), None, "run.json")
    plan = run.about.get("plan")
    return dataclasses.replace(job, plan=plan) if isinstance(plan, str) else job


def _bytes(job: Job, number: int | None) -> list[dict[str, Any]]:
    """What rank 0 moves by axis, operation and subject, in the step that was measured: in some of the first
    ones ranks compare what they have."""
    from echelon.engine.dry_run import dry_run
    from echelon.train.task import open_task
    from echelon.update.optim.optimizers import make_optimizer

    plan = Plan.parse(job.plan)
    task = open_task(job)
    if task.num_parameters > MOST_PARAMETERS:
        raise UserError(
            f"the model has {task.num_parameters:,} parameters; echelon.dry_run takes some minutes"
        )
    dry = dry_run(
        task.build,
        plan,
        task.training.at(0, (0, plan.data)),
        optimizer=partial(make_optimizer, job.optimizer),
        loss=task.loss,
        steps=max(1, min(number or MEASURED_STEP, MEASURED_STEP)),
        clip=job.optimizer.clip,
        loss_scale=job.loss_scale,
        seed=job.seed,
        nonfinite=job.engine_nonfinite,
        most_skipped=job.most_skipped,
        average=job.average,
        layers=job.layers,
    )
    rows: list[dict[str, Any]] = dry.to_dict()["moved"][-1]
    return rows


def _cluster(run: RunFiles, job: Job) -> Any:
    from echelon.planner import read_cluster
    from echelon.planner.cluster.read import device_names

    ranks = Plan.parse(job.plan).ranks
    rows = run.measured.get("ranks")
    device = rows[0].get("device") if isinstance(rows, list) and rows and isinstance(rows[0], dict) else None
    if device is None:
        raise UserError("measured.json does not say on which device the run was")
    if device == "cpu":
        return read_cluster(f"cpu:{ranks}")
    words = str(device).lower().replace("-", " ").split()
    names = [name for name in device_names() if name in words]
    if not names:
        raise UserError(f"the planner has no figures of a {device}; it has {', '.join(device_names())}")
    return read_cluster(f"{max(names, key=len)}:{ranks}")


def _shape(job: Job) -> Any:
    from echelon.planner.shape.presets import shape_of

    config: Any = job.model.config()
    return shape_of(config)


def _prediction(job: Job, cluster: Any) -> dict[str, Any]:
    from echelon.planner import predict

    with redirect_stderr(io.StringIO()):
        return dict(predict(_shape(job), job.plan, cluster, job.batch, job.sequence).to_dict())


def _plans(job: Job, cluster: Any) -> list[dict[str, Any]]:
    """The fastest plans for the same devices and batch, with the line that trains each."""
    from echelon.planner import search

    plan = Plan.parse(job.plan)
    result = search(
        _shape(job), cluster, job.batch, sequence=job.sequence, precision=plan.precision, top=_NUM_PLANS
    )
    return [
        {
            "plan": found.plan,
            "seconds": found.prediction.step_seconds,
            "peak": found.prediction.peak,
            "mfu": found.prediction.mfu,
            "command": job_line(job, found.plan),
        }
        for found in result.best
    ]


def job_line(job: Job, plan: str) -> str:
    """The command that trains the job with another plan."""
    settings = [word for name, value in changes(job) for word in ("--set", f"{name}={_toml(value)}")]
    return shlex.join(["echelon", "train", "--plan", plan, *settings])


def changes(job: Job) -> list[tuple[str, Any]]:
    """The settings that differ from the embedded job's, but for the plan: [("model.layers", 12)]."""

    def flat(table: dict[str, Any], path: str = "") -> dict[str, Any]:
        rows: dict[str, Any] = {}
        for name, value in table.items():
            rows |= flat(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}": value}
        return rows

    usual, own = flat(as_plain(Job())), flat(as_plain(job))
    return [
        (name, own[name]) for name in own if name not in ("plan", "trace") and usual.get(name) != own[name]
    ]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value)
