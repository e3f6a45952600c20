"""Keys of a job that only another task reads: what they say would be ignored in silence."""

import dataclasses
from typing import TYPE_CHECKING

from echelon.models import ExpertsConfig
from echelon.train.runs.findings import Findings

if TYPE_CHECKING:
    from echelon.train.jobs.job import Job

_EXPERTS = [f"experts.{field.name}" for field in dataclasses.fields(ExpertsConfig)]
_SIZES = (
    *("layers", "width", "heads", "kv_heads", "ffn", "vocab", "sequence", "tied", "head_width", "qk_norm"),
    *_EXPERTS,
)
_KEYS = {
    "language": ("sequence", *(f"model.{name}" for name in _SIZES), "data.dtype"),
    "images": ("model.image_size", "model.divisor", "data.augment"),
}


def refuse_foreign_keys(job: "Job", findings: Findings) -> None:
    """An error for each key that is set and of another task."""
    for task, keys in _KEYS.items():
        for key in keys if task != job.task else ():
            value = _value(job, key)
            if value is not None:
                findings.add(
                    f"{key}={value}: task={job.task} does not read it; leave it out, or set task={task}", key
                )


def _value(job: "Job", key: str) -> object:
    value: object = job
    for name in key.split("."):
        value = getattr(value, name)
    return value
