"""The tasks that a job may have, by name."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from echelon.errors import UserError, did_you_mean
from echelon.models import ImageConfig, ModelConfig
from echelon.train.image_task import ImageTask, model_config, open_data
from echelon.train.jobs.image_rules import check_image_data, check_image_model
from echelon.train.jobs.language_rules import check_language_data, check_language_model
from echelon.train.language_task import LanguageTask
from echelon.train.runs.findings import Findings
from echelon.train.task import Task

if TYPE_CHECKING:
    from echelon.train.jobs.job import Job

TASKS = ("language", "images")

_CLASSES: dict[str, type[LanguageTask] | type[ImageTask]] = {"language": LanguageTask, "images": ImageTask}
MODEL_CHECKS: dict[str, Callable[["Job", Findings], ModelConfig | ImageConfig | None]] = {
    "language": check_language_model,
    "images": check_image_model,
}
# Each takes what the check of its own model returned.
DATA_CHECKS: dict[str, Callable[["Job", Any, Findings], None]] = {
    "language": check_language_data,
    "images": check_image_data,
}


def config_of(job: "Job") -> ModelConfig | ImageConfig:
    """The sizes of a job's model; of images, the classes are those of the data."""
    if job.task not in TASKS:
        raise UserError(f"task={job.task!r}: is not a task{did_you_mean(job.task, TASKS)}")
    return job.model.config() if job.task == "language" else model_config(job, open_data(job))


def open_task(job: "Job") -> Task:
    """The task of a job: its data are opened, its model is not built yet."""
    return _CLASSES[job.task](job)
