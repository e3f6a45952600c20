"""The rules of a job. All errors are reported at once.

A rule between values is checked only if each value is valid on its own: with `steps=0` the warm-up is not
reported as too long. For this, the invalid keys are kept beside the errors.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from echelon.audit import MODES
from echelon.data import Corpus, corpus_errors, open_corpus
from echelon.engine.auto import ranks_here
from echelon.engine.support import refuse_unsupported
from echelon.errors import UserError, did_you_mean
from echelon.models import ModelConfig
from echelon.optim.schedules import schedule_errors
from echelon.plan import Plan
from echelon.precision.loss_scaling import loss_scale_errors
from echelon.train.batches import make_batches
from echelon.train.memory_fit import host_memory_errors
from echelon.train.plan_fit import division_errors
from echelon.train.plan_work import work_error
from echelon.train.rank_fit import rank_error, ranks_on_this_host
from echelon.train.run_folder import place_error

if TYPE_CHECKING:
    from echelon.train.job import Job, OptimizerJob

T = TypeVar("T")

OPTIMIZERS = ("adamw", "sgd", "adafactor", "sm3")

_LEAST = {"steps": 1, "batch": 1, "sequence": 1, "evaluate_every": 0, "evaluate_batches": 1, "seed": 0}
_TOO_MANY = 2**63  # more than torch and numpy can count


def job_errors(job: "Job", unread: Iterable[str] = ()) -> list[str]:
    """Every error that shows before a rank starts.

    `unread` names keys ("steps", "model.layers") whose value could not be read, so that they have their
    default: rules that depend on them are skipped.
    """
    findings = _Findings(set(unread))
    _check_counts(job, findings)
    _check_names(job, findings)
    _check_optimizer(job.optimizer, findings)
    plan = _check_plan(job, findings)
    config = _check_model(job, findings)
    _check_schedule(job, findings)
    _check_data(job, config, findings)
    if plan is not None and config is not None and findings.all_valid("plan"):
        _check_machine(job, config, plan, findings)
    return findings.errors


@dataclass
class _Findings:
    """The errors so far, and the invalid keys."""

    invalid: set[str]
    errors: list[str] = field(default_factory=list)

    def add(self, error: str, *keys: str) -> None:
        self.errors.append(error)
        self.invalid.update(keys)

    def all_valid(self, *keys: str) -> bool:
        """Whether each of `keys` is valid, with its table and what it contains."""
        return not any(
            f"{key}.".startswith(f"{bad}.") or bad.startswith(f"{key}.")
            for key in keys
            for bad in self.invalid
        )

    def attempt(self, make: Callable[[], T], where: str, *keys: str) -> T | None:
        """The result of `make`, or None with its errors added under `where`."""
        try:
            return make()
        except UserError as refusal:
            for error in refusal.errors or (refusal.title,):
                self.add(f"{where}: {error}", *keys)
            return None


def _check_counts(job: "Job", findings: _Findings) -> None:
    for name, least in _LEAST.items():
        value = getattr(job, name)
        if value is not None and value < least:
            findings.add(f"{name}={value}: must be at least {least}", name)
        if value is not None and value >= _TOO_MANY:
            findings.add(f"{name}={value}: must be below 2**63", name)


def _check_names(job: "Job", findings: _Findings) -> None:
    if job.audit not in MODES:
        findings.add(f"audit={job.audit!r}: must be one of {', '.join(MODES)}", "audit")
    if "/" in job.name:
        findings.add(f"name={job.name!r}: must not contain '/'; use out= for the parent folder", "name")
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


def _check_optimizer(optimizer: "OptimizerJob", findings: _Findings) -> None:
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


def _check_plan(job: "Job", findings: _Findings) -> Plan | None:
    """The plan, if it is one."""
    if not job.plan.strip():
        findings.add("plan='': must not be empty; data=1 trains on one rank", "plan")
    if not findings.all_valid("plan"):
        return None
    plan = findings.attempt(lambda: Plan.parse(job.plan), "plan", "plan")
    if plan is None:
        return None
    findings.attempt(lambda: refuse_unsupported(plan), "plan", "plan")
    if findings.all_valid("loss_scale"):
        for error in loss_scale_errors(job.loss_scale, plan.precision):
            findings.add(error, "loss_scale")
    for unfit in (rank_error(plan), work_error(plan)):
        if unfit is not None:
            findings.add(unfit, "plan")
    if findings.all_valid("plan", "batch") and job.batch < plan.data:
        findings.add(
            f"batch={job.batch} plan={plan}: every replica needs a sample; set batch={plan.data}", "batch"
        )
    return plan


def _check_machine(job: "Job", config: ModelConfig, plan: Plan, findings: _Findings) -> None:
    """Whether this machine can hold the model, and the plan can divide it."""
    ranks = ranks_on_this_host(ranks_here(plan))
    for error in host_memory_errors(job, config, plan, ranks):
        findings.add(error, "plan", "model")
    if findings.all_valid("plan"):
        for error in division_errors(config, plan):
            findings.add(f"plan '{plan}': {error}", "plan")


def _check_model(job: "Job", findings: _Findings) -> ModelConfig | None:
    """The sizes of the model, if they are valid."""
    # Sizes are checked together only if all are known; otherwise check at least the preset.
    model = job.model if findings.all_valid("model") else job.model.without_sizes()
    config = findings.attempt(model.config, "model", "model")
    if config is None or not findings.all_valid("model"):
        return None
    if findings.all_valid("sequence") and job.sequence_length > config.sequence:
        findings.add(
            f"sequence={job.sequence}: the model reads at most {config.sequence} tokens; "
            f"set model.sequence={job.sequence} too",
            "sequence",
        )
    return config


def _check_schedule(job: "Job", findings: _Findings) -> None:
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


def _check_data(job: "Job", config: ModelConfig | None, findings: _Findings) -> None:
    data = job.data
    if not 0 <= data.validation_fraction < 1:
        findings.add(
            f"data.validation_fraction={data.validation_fraction}: must be at least 0 and below 1",
            "data.validation_fraction",
        )
    corpus = _check_corpus(job, config, findings)
    needed = ("plan", "batch", "sequence", "seed", "data.validation_fraction")
    if corpus is not None and findings.all_valid(*needed):
        findings.attempt(lambda: make_batches(job, corpus), f"data.source={data.source}")


def _check_corpus(job: "Job", config: ModelConfig | None, findings: _Findings) -> Corpus | None:
    """The corpus. It is opened here first, so that its errors show before a rank starts."""
    data, where = job.data, f"data.source={job.data.source}"
    if not findings.all_valid("data.source", "data.dtype"):
        return None
    if config is not None:
        vocab = config.vocab
        return findings.attempt(lambda: open_corpus(data.source, vocab=vocab, dtype=data.dtype), where)
    for error in corpus_errors(data.source, vocab=None, dtype=data.dtype):
        findings.add(f"{where}: {error}")
    return None
