"""The rules of a job about its task: the sizes of the model, the data, and keys that only another task reads.

A rule between values is checked only if each value is valid on its own: with `steps=0` the warm-up is not
reported as too long.
"""

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeVar

from echelon.data import TrainingImages, corpus_errors
from echelon.errors import UserError
from echelon.models import ExpertsConfig, ImageConfig, ModelConfig, build_without_memory
from echelon.plan import Plan
from echelon.train.jobs.job import Job
from echelon.train.task import make_batches, open_data, open_text

T = TypeVar("T")


@dataclass
class Findings:
    invalid: set[str]
    errors: list[str] = field(default_factory=list)

    def add(self, error: str, *keys: str) -> None:
        self.errors.append(error)
        self.invalid.update(keys)

    def all_valid(self, *keys: str) -> bool:
        """Return whether each of `keys` is valid, with its table and what it contains."""
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


_SIZES = (
    *("layers", "width", "heads", "kv_heads", "ffn", "vocab", "sequence", "tied", "head_width", "qk_norm"),
    *(f"experts.{field.name}" for field in dataclasses.fields(ExpertsConfig)),
)
_TEXT_KEYS = ("data.dtype", "data.tokenizer", "data.field", "data.cache")
_TASK_KEYS = {
    "language": ("sequence", *(f"model.{name}" for name in _SIZES), *_TEXT_KEYS),
    "images": ("model.image_size", "model.divisor", "data.augment"),
}


def refuse_foreign_keys(job: Job, findings: Findings) -> None:
    """An error for each key that is set and of another task."""
    for task, keys in _TASK_KEYS.items():
        for key in keys if task != job.task else ():
            value = reduce(getattr, key.split("."), job)
            if value is not None:
                findings.add(
                    f"{key}={value}: task={job.task} does not read it; leave it out, or set task={task}", key
                )


def check_language_model(job: Job, findings: Findings) -> ModelConfig | None:
    refuse_foreign_keys(job, findings)
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


def check_language_data(job: Job, config: ModelConfig | None, findings: Findings) -> None:
    """Opens the corpus, so that its errors show before a rank starts."""
    source, dtype = job.data.text_source, job.data.dtype
    where = f"data.source={source}"
    if not findings.all_valid("data.source", *_TEXT_KEYS):
        return
    if config is None:
        findings.errors += [f"{where}: {error}" for error in corpus_errors(source, vocab=None, dtype=dtype)]
        return
    corpus = findings.attempt(lambda: open_text(job, config.vocab), where)
    if corpus is not None and corpus.starts is not None and findings.all_valid("plan"):
        context = Plan.parse(job.plan).context
        if context > 1:
            findings.add(
                f"{where} plan '{job.plan}': ranks that share a sequence (context={context}) cannot tell its "
                "documents apart; use context=1, or a .bin file of tokens, which is one text",
                "plan",
            )
    needed = ("plan", "batch", "sequence", "seed", "data.validation_fraction")
    if corpus is not None and findings.all_valid(*needed):
        findings.attempt(lambda: make_batches(job, corpus), where)


def check_image_model(job: Job, findings: Findings) -> ImageConfig | None:
    """The sizes of the model, if they are valid; the classes are those of the preset, or of the weights."""
    refuse_foreign_keys(job, findings)
    if findings.all_valid("plan"):
        with suppress(UserError):  # reported with the plan
            plan = Plan.parse(job.plan)
            if plan.tensor * plan.context > 1:
                findings.add(
                    f"plan '{plan}': images have no sequence, and convolutions are not split along tensor; "
                    "use data, zero and pipeline",
                    "plan",
                )
    model = job.model if findings.all_valid("model") else job.model.without_sizes()
    config = findings.attempt(model.image_config, "model", "model")
    if config is not None and findings.all_valid("model"):
        findings.attempt(lambda: build_without_memory(config), "model", "model")  # too small images
    return config if findings.all_valid("model") else None


def check_image_data(job: Job, config: ImageConfig | None, findings: Findings) -> None:
    """Lists the images, and decodes them: a broken file must not end a training that has begun."""
    where = f"data.source={job.data.image_source}"
    if config is None or not findings.all_valid("data.source", "data.validation_fraction"):
        return
    data = findings.attempt(lambda: open_data(job), where, "data.source")
    if data is None:
        return
    for error in data.errors():
        findings.add(f"{where}: {error}", "data.source")
    findings.attempt(lambda: job.model.image_config(data.class_names), "model", "model")
    if findings.all_valid("data.source", "batch", "seed"):
        findings.attempt(
            lambda: TrainingImages(data.training, job.batch, config.image_size, job.seed), where, "batch"
        )


MODEL_CHECKS: dict[str, Callable[[Job, Findings], ModelConfig | ImageConfig | None]] = {
    "language": check_language_model,
    "images": check_image_model,
}
# Each takes what the check of its own model returned.
DATA_CHECKS: dict[str, Callable[[Job, Any, Findings], None]] = {
    "language": check_language_data,
    "images": check_image_data,
}
