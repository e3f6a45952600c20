"""The rules of a job. All errors are reported at once.

Those of its model and data are in task_rules.py.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import final

from echelon.collectives import Group, RecordingGroup
from echelon.collectives.mesh import Mesh
from echelon.engine.arguments import check_average
from echelon.engine.audit import MODES
from echelon.engine.auto import ranks_here
from echelon.engine.stage_split import split_stages
from echelon.errors import UserError, did_you_mean, raise_errors
from echelon.models import ImageConfig, ModelConfig, build_without_memory, cross_entropy
from echelon.nn.dropout.modules import key_dropout
from echelon.nn.layering import name_layers
from echelon.nn.wrapping import Wrapping
from echelon.parallel.layer_sharding import LayerSharding
from echelon.plan import AUTO, Plan
from echelon.train.jobs.job import Job, OptimizerJob
from echelon.train.jobs.machine_fit import host_memory_errors, rank_error, ranks_on_this_host
from echelon.train.jobs.task_rules import DATA_CHECKS, MODEL_CHECKS, Findings
from echelon.train.runs.run_folder import place_error
from echelon.train.task import TASKS
from echelon.train.tracker_kinds import tracker_errors
from echelon.update.nonfinite import why_unskippable
from echelon.update.optim.learning_rate import schedule_errors
from echelon.update.precision.loss_scaling import loss_scale_errors

OPTIMIZERS = ("adamw", "sgd", "adafactor", "sm3")

_LEAST = {
    "steps": 1,
    "batch": 1,
    "sequence": 1,
    "evaluate_every": 0,
    "evaluate_batches": 1,
    "seed": 0,
    "save_every": 0,
    "keep": 1,
    "keep_every": 0,
    "restarts": 0,
    "most_skipped": 1,
    "spike_window": 1,
    "max_rollbacks": 0,
}
_TOO_MANY = 2**63  # more than torch and numpy can count


def check(job: Job) -> None:
    """Raise one UserError with every error that shows before a rank starts."""
    raise_errors("the job", job_errors(job))


def job_errors(job: Job, unread: Iterable[str] = ()) -> list[str]:
    """Every error that shows before a rank starts.

    `unread` names keys ("steps", "model.layers") whose value could not be read, so that they have their
    default: rules that depend on them are skipped.
    """
    findings = Findings(set(unread))
    _check_counts(job, findings)
    _check_names(job, findings)
    _check_optimizer(job.optimizer, findings)
    plan = _check_plan(job, findings)
    check_numbers(job, plan, findings)
    for error in _errors(lambda: check_average(job.average, plan or Plan())):
        findings.add(error, "average")
    if plan is not None and job.keep == "memory" and plan.sync != "all-reduce":
        findings.add(
            f"keep='memory' plan='{plan}': with sync={plan.sync} the server owns all weights, and a lost "
            "rank could not go on from its own copy; set keep=2 for checkpoints on disk, or sync=all-reduce",
            "keep",
        )
    if not findings.all_valid("task"):  # of which task the other keys are is not known
        _check_schedule(job, findings)
        return findings.errors
    config = MODEL_CHECKS[job.task](job, findings)
    _check_schedule(job, findings)
    fraction, key = job.data.validation_fraction, "data.validation_fraction"
    if not 0 <= fraction < 1:
        findings.add(f"{key}={fraction}: must be at least 0 and below 1", key)
    DATA_CHECKS[job.task](job, config, findings)
    if config is not None:
        for error in _errors(lambda: name_layers(build_without_memory(config), job.layers)):
            findings.add(error, "layers")
    if plan is not None and config is not None and findings.all_valid("plan"):
        for error in host_memory_errors(job, config, plan, ranks_on_this_host(ranks_here(plan))):
            findings.add(error, "plan", "model")
        if findings.all_valid("plan", "layers"):
            errors = division_errors(config, plan, job.layers)
            findings.errors += [f"plan '{plan}': {error}" for error in errors]
    return findings.errors


def _check_counts(job: Job, findings: Findings) -> None:
    for name, least in _LEAST.items():
        value = getattr(job, name)
        if value is None or isinstance(value, str):  # keep='memory'
            continue
        if value < least:
            findings.add(f"{name}={value}: must be at least {least}", name)
        if value >= _TOO_MANY:
            findings.add(f"{name}={value}: must be below 2**63", name)
    if job.minutes is not None and not 0 < job.minutes < math.inf:
        findings.add(f"minutes={job.minutes}: must be a number above 0, or left out", "minutes")
    if findings.all_valid("save_every", "keep_every") and job.keep_every:
        if job.save_every == 0:
            findings.add(
                f"keep_every={job.keep_every} save_every=0: no checkpoint is saved before the end; set "
                f"save_every={job.keep_every}, or leave keep_every out",
                "keep_every",
            )
        elif job.keep_every % job.save_every:
            findings.add(
                f"keep_every={job.keep_every} save_every={job.save_every}: must be a multiple of save_every; "
                f"set keep_every={-(-job.keep_every // job.save_every) * job.save_every}",
                "keep_every",
            )
    if findings.all_valid("save_every", "keep") and job.keep == "memory" and job.save_every == 0:
        findings.add(
            "keep='memory' save_every=0: no copy would be made; set save_every to the steps between two "
            "copies (save_every=10), or keep=2",
            "keep",
        )


def _check_names(job: Job, findings: Findings) -> None:
    if job.task not in TASKS:
        findings.add(f"task={job.task!r}: is not a task{did_you_mean(job.task, TASKS)}", "task")
    if job.audit not in MODES:
        findings.add(f"audit={job.audit!r}: must be one of {', '.join(MODES)}", "audit")
    if "/" in job.name:
        findings.add(f"name={job.name!r}: must not contain '/'; use out= for the parent folder", "name")
    if job.name.startswith("."):
        findings.add(
            f"name={job.name!r}: must not begin with a dot, which hides the folder of a run; begin with a "
            "letter or a digit",
            "name",
        )
    if job.track is not None:
        for fault in tracker_errors(job.track):
            findings.add(f"track: {fault}", "track")
    if findings.all_valid("trace", "steps"):
        _check_trace(job, findings)
    if not job.name:
        findings.add("name='': must not be empty", "name")
    if not job.out:
        findings.add("out='': must not be empty; use out=. for this folder", "out")
    for key, text in (("name", job.name), ("out", job.out)):
        # Python represents a byte that the locale cannot decode as a lone surrogate.
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            findings.add(
                f"{key}={text!r}: no NUL character may be in a folder's name, nor bytes that are not text "
                "in this locale; remove them, or set LC_ALL=C.UTF-8",
                key,
            )
    if findings.all_valid("out"):
        error = place_error(Path(job.out))
        if error is not None:
            findings.add(f"out={job.out}: {error}", "out")


def _check_trace(job: Job, findings: Findings) -> None:
    try:
        _ = job.trace_steps
    except ValueError:
        findings.add(
            f"trace={job.trace!r}: must be the first step and the one after the last, of steps 1 to "
            f"{job.steps}, like trace=10:13",
            "trace",
        )


def _check_optimizer(optimizer: OptimizerJob, findings: Findings) -> None:
    if optimizer.name not in OPTIMIZERS:
        findings.add(f"optimizer.name={optimizer.name}: is unknown{did_you_mean(optimizer.name, OPTIMIZERS)}")
    if not 0 < optimizer.learning_rate < math.inf:
        findings.add(f"optimizer.learning_rate={optimizer.learning_rate}: must be a number above 0")
    for name in ("weight_decay", "momentum"):
        if not 0 <= getattr(optimizer, name) < math.inf:
            findings.add(f"optimizer.{name}={getattr(optimizer, name)}: must be a number, at least 0")
    if optimizer.name == "sm3" and optimizer.momentum >= 1:
        findings.add(f"optimizer.momentum={optimizer.momentum}: must be below 1 for sm3")
    if optimizer.clip is not None and not 0 < optimizer.clip < math.inf:
        findings.add(f"optimizer.clip={optimizer.clip}: must be a number above 0, or left out")
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        findings.add(f"optimizer.betas={list(optimizer.betas)}: each must be at least 0 and below 1")


def _check_plan(job: Job, findings: Findings) -> Plan | None:
    if not job.plan.strip():
        findings.add("plan='': must not be empty; data=1 trains on one rank", "plan")
    if not findings.all_valid("plan"):
        return None
    plan = findings.attempt(lambda: Plan.parse(job.plan), "plan", "plan")
    if plan is not None and findings.all_valid("loss_scale"):
        for error in loss_scale_errors(job.loss_scale, plan.precision):
            findings.add(error, "loss_scale")
    for unfit in () if plan is None else (rank_error(plan), work_error(plan)):
        if unfit is not None:
            findings.add(unfit, "plan")
    if plan is not None and findings.all_valid("plan", "batch") and job.batch < plan.data:
        findings.add(
            f"batch={job.batch} plan={plan}: every replica needs a sample; set batch={plan.data}", "batch"
        )
    return plan


def _check_schedule(job: Job, findings: Findings) -> None:
    optimizer = job.optimizer
    errors = schedule_errors(
        optimizer.schedule if findings.all_valid("optimizer.schedule") else None,
        job.steps if findings.all_valid("steps") else None,
        job.warmup if findings.all_valid("steps") or optimizer.warmup is not None else 0,
        optimizer.decay,
        optimizer.floor,
    )
    for error in errors:
        findings.add(f"optimizer.schedule: {error}")


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


def division_errors(config: ModelConfig | ImageConfig, plan: Plan, layers: str | None = None) -> list[str]:
    """Why a model of these sizes cannot be divided as `plan` says; with pipeline=auto, but for its stages."""
    if plan.pipeline == AUTO:
        plan = dataclasses.replace(plan, pipeline=1)
    if plan.tensor * plan.context * plan.stages * plan.expert == 1 and not plan.schedule_is_file:
        return []
    model, mesh, wrapping = build_without_memory(config), _PretendedMesh.pretend(plan, 0), Wrapping()
    name_layers(model, layers)
    key_dropout(model, wrapping)  # every job has a seed
    by_layers = plan.sequence or plan.context > 1
    return [
        *_errors(lambda: LayerSharding(model, mesh, cross_entropy, None, wrapping)),
        *_errors(lambda: split_stages(model, mesh, None, by_layers=by_layers)),
    ]


@final
class _PretendedMesh(Mesh):
    """A mesh without process groups, also for weights that stages share."""

    def group_of_stages(self, stages: Collection[int]) -> Group:  # noqa: ARG002
        return RecordingGroup("tied", ledger=self.ledger)


def _errors(divide: Callable[[], object]) -> list[str]:
    try:
        divide()
    except UserError as refusal:
        return list(refusal.errors or (refusal.title,))
    return []


CHOICES = ("skip", "stop")


def check_numbers(job: Job, plan: Plan | None, findings: Findings) -> None:
    """`plan`: if it is valid."""
    if job.nonfinite not in (None, *CHOICES):
        findings.add(f"nonfinite={job.nonfinite!r}: must be one of {', '.join(CHOICES)}", "nonfinite")
    reason = why_unskippable(plan) if plan is not None else None
    if reason is not None and job.nonfinite == "skip":
        findings.add(f"nonfinite=skip {reason}, or nonfinite=stop", "nonfinite")
    factor = job.spike_factor
    if factor != 0 and not 1 < factor < math.inf:
        findings.add(f"spike_factor={factor}: must be a number above 1, or 0 for none", "spike_factor")
    if not factor or not findings.all_valid("spike_factor", "save_every"):
        return
    if job.save_every == 0:
        findings.add(
            f"spike_factor={factor} save_every=0: after a spike training goes back to a checkpoint, and none "
            "is saved before the end; set save_every=100, or spike_factor=0",
            "spike_factor",
        )
    if plan is not None and plan.sync == "async":
        findings.add(
            f"spike_factor={factor} sync=async: workers see losses of their own, and cannot go back "
            "together; use sync=all-reduce, or spike_factor=0",
            "spike_factor",
        )
