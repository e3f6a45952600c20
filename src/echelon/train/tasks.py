"""The tasks that a job may have, by name."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from echelon.models import ImageConfig, ModelConfig
from echelon.train.findings import Findings
from echelon.train.image_rules import check_image_data, check_image_model
from echelon.train.image_task import ImageTask
from echelon.train.language_rules import check_language_data, check_language_model
from echelon.train.language_task import LanguageTask
from echelon.train.task import Task

if TYPE_CHECKING:
    from echelon.train.job import Job

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


def open_task(job: "Job") -> Task:
    """The task of a job: its data are opened, its model is not built yet."""
    return _CLASSES[job.task](job)
