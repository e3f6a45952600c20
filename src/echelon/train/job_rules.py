"""What can be wrong with a job: every error at once, and each value judged once.

A rule between values is asked only where each of them makes sense alone: with `steps=0` nobody wants to
hear that the warm-up is longer than that. The keys at error are kept for this beside the errors.
"""

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from echelon.data import Corpus, corpus_errors, open_corpus
from echelon.engine.support import refuse_unsupported
from echelon.errors import UserError, did_you_mean
from echelon.launching.torchrun import is_under_torchrun
from echelon.models import ModelConfig
from echelon.optim.schedules import schedule_errors
from echelon.plan import AUTO, Plan
from echelon.train.batches import make_batches

if TYPE_CHECKING:
    from echelon.train.job import Job, OptimizerJob

T = TypeVar("T")

OPTIMIZERS = ("adamw", "sgd")

# More processes than this on each core do not train, they only fill the machine.
RANKS_PER_CORE = 64

_LEAST = {"steps": 1, "batch": 1, "sequence": 1, "evaluate_every": 0, "evaluate_batches": 1, "seed": 0}
_TOO_MANY = 2**63  # what torch and numpy cannot count to


def job_errors(job: "Job", unread: Iterable[str] = ()) -> list[str]:
    """Every error that can be seen without starting a rank.

    `unread` names keys ("steps", "model.layers") that stand at their default only because what the user
    wrote could not be read: what depends on them is not judged.
    """
    found = _Findings(set(unread))
    _judge_counts(job, found)
    _judge_names(job, found)
    _judge_optimizer(job.optimizer, found)
    _judge_plan(job, found)
    config = _judge_model(job, found)
    _judge_schedule(job, found)
    _judge_data(job, config, found)
    return found.errors


@dataclass
class _Findings:
    """The errors so far, and the keys that are at error."""

    invalid: set[str]
    errors: list[str] = field(default_factory=list)

    def add(self, error: str, *keys: str) -> None:
        self.errors.append(error)
        self.invalid.update(keys)

    def sound(self, *keys: str) -> bool:
        """Whether nothing is wrong with `keys`: not with the key, its table, or what it holds."""
        return not any(
            f"{key}.".startswith(f"{bad}.") or bad.startswith(f"{key}.")
            for key in keys
            for bad in self.invalid
        )

    def attempt(self, make: Callable[[], T], where: str, *keys: str) -> T | None:
        """What `make` makes; where it refuses, its errors are added under `where`."""
        try:
            return make()
        except UserError as refusal:
            for error in refusal.errors or (refusal.title,):
                self.add(f"{where}: {error}", *keys)
            return None


def _judge_counts(job: "Job", found: _Findings) -> None:
    for name, least in _LEAST.items():
        value = getattr(job, name)
        if value is not None and value < least:
            found.add(f"{name}={value}: must be at least {least}", name)
        if value is not None and value >= _TOO_MANY:
            found.add(f"{name}={value}: must be below 2**63", name)


def _judge_names(job: "Job", found: _Findings) -> None:
    if "/" in job.name:
        found.add(f"name={job.name!r}: must not contain '/'; use out= for the parent folder", "name")
    if not job.name:
        found.add("name='': must not be empty", "name")
    for key, text in (("name", job.name), ("out", job.out)):
        # A lone surrogate is how Python keeps a byte that the locale cannot read.
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            found.add(
                f"{key}={text!r}: no NUL character can stand in a folder's name, nor bytes that are not text "
                "in this locale; leave them out, or set LC_ALL=C.UTF-8",
                key,
            )


def _judge_optimizer(its: "OptimizerJob", found: _Findings) -> None:
    if its.name not in OPTIMIZERS:
        found.add(f"optimizer.name={its.name}: is unknown{did_you_mean(its.name, OPTIMIZERS)}")
    if not 0 < its.learning_rate < math.inf:
        found.add(f"optimizer.learning_rate={its.learning_rate}: must be a number above 0")
    for name in ("weight_decay", "momentum"):
        if not 0 <= getattr(its, name) < math.inf:
            found.add(f"optimizer.{name}={getattr(its, name)}: must be a number, at least 0")
    if its.clip is not None and not its.clip > 0:
        found.add(f"optimizer.clip={its.clip}: must be above 0, or left out")
    if not all(0 <= beta < 1 for beta in its.betas):
        found.add(f"optimizer.betas={list(its.betas)}: each must be at least 0 and below 1")


def _judge_plan(job: "Job", found: _Findings) -> None:
    plan = found.attempt(lambda: Plan.parse(job.plan), "plan", "plan")
    if plan is None:
        return
    found.attempt(lambda: refuse_unsupported(plan), "plan")
    cores = os.cpu_count() or 1
    if plan.pipeline != AUTO and plan.ranks > RANKS_PER_CORE * cores and not is_under_torchrun():
        found.add(
            f"plan '{plan}': needs {plan.ranks} ranks, but this machine ({cores} cores) starts at most "
            f"{RANKS_PER_CORE * cores}; use fewer ranks, or start them on several machines with torchrun"
        )
    if found.sound("plan", "batch") and job.batch < plan.data:
        found.add(
            f"batch={job.batch} plan={plan}: every replica needs a sample; set batch={plan.data}", "batch"
        )


def _judge_model(job: "Job", found: _Findings) -> ModelConfig | None:
    """The sizes, where nothing is wrong with them."""
    # Sizes fit together only when all are known; else ask at least what they would change.
    its = job.model if found.sound("model") else job.model.without_sizes()
    config = found.attempt(its.config, "model", "model")
    if config is None or not found.sound("model"):
        return None
    if found.sound("sequence") and job.sequence_length > config.sequence:
        found.add(
            f"sequence={job.sequence}: the model reads at most {config.sequence} tokens; "
            f"set model.sequence={job.sequence} too",
            "sequence",
        )
    return config


def _judge_schedule(job: "Job", found: _Findings) -> None:
    its = job.optimizer
    errors = schedule_errors(
        its.schedule if found.sound("optimizer.schedule") else None,
        job.steps if found.sound("steps") else None,
        job.warmup if found.sound("steps") or its.warmup is not None else 0,
        its.decay,
        its.floor,
    )
    for error in errors:
        found.add(f"optimizer.schedule: {error}")


def _judge_data(job: "Job", config: ModelConfig | None, found: _Findings) -> None:
    its = job.data
    if not 0 <= its.validation_fraction < 1:
        found.add(
            f"data.validation_fraction={its.validation_fraction}: must be at least 0 and below 1",
            "data.validation_fraction",
        )
    corpus = _judge_corpus(job, config, found)
    needed = ("plan", "batch", "sequence", "seed", "data.validation_fraction")
    if corpus is not None and found.sound(*needed):
        found.attempt(lambda: make_batches(job, corpus), f"data.source={its.source}")


def _judge_corpus(job: "Job", config: ModelConfig | None, found: _Findings) -> Corpus | None:
    """The corpus, opened here first: its errors should not have to come out of a rank."""
    its, where = job.data, f"data.source={job.data.source}"
    if not found.sound("data.source", "data.dtype"):
        return None
    if config is not None:
        vocab = config.vocab
        return found.attempt(lambda: open_corpus(its.source, vocab=vocab, dtype=its.dtype), where)
    for error in corpus_errors(its.source, vocab=None, dtype=its.dtype):
        found.add(f"{where}: {error}")
    return None
