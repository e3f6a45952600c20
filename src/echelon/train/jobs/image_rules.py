"""The rules of a job that trains an image model: its sizes, its images, and plans that divide neither."""

from typing import TYPE_CHECKING

from echelon.data import ImageData, TrainingImages
from echelon.errors import UserError
from echelon.models import ImageConfig, build_without_memory
from echelon.plan import Plan
from echelon.train.image_task import model_config, open_data
from echelon.train.jobs.foreign_keys import refuse_foreign_keys
from echelon.train.runs.findings import Findings

if TYPE_CHECKING:
    from echelon.train.jobs.job import Job


def check_image_model(job: "Job", findings: Findings) -> ImageConfig | None:
    """The sizes of the model, if they are valid; the classes are those of the preset, or of the weights."""
    refuse_foreign_keys(job, findings)
    _check_plan(job, findings)
    model = job.model if findings.all_valid("model") else job.model.without_sizes()
    config = findings.attempt(model.image_config, "model", "model")
    if config is not None and findings.all_valid("model"):
        findings.attempt(lambda: build_without_memory(config), "model", "model")  # too small images
    return config if findings.all_valid("model") else None


def check_image_data(job: "Job", config: ImageConfig | None, findings: Findings) -> None:
    """Lists the images, and decodes them: a broken file must not end a training that has begun."""
    where = f"data.source={job.data.image_source}"
    if config is None or not findings.all_valid("data.source", "data.validation_fraction"):
        return
    data = findings.attempt(lambda: open_data(job), where, "data.source")
    if data is None:
        return
    for error in data.errors():
        findings.add(f"{where}: {error}", "data.source")
    findings.attempt(lambda: model_config(job, data), "model", "model")
    if findings.all_valid("data.source", "batch", "seed"):
        findings.attempt(lambda: _check_batches(job, config, data), where, "batch")


def _check_batches(job: "Job", config: ImageConfig, data: ImageData) -> None:
    TrainingImages(data.training, job.batch, config.image_size, job.seed)


def _check_plan(job: "Job", findings: Findings) -> None:
    if not findings.all_valid("plan"):
        return
    try:
        plan = Plan.parse(job.plan)
    except UserError:
        return  # reported with the plan
    if plan.tensor * plan.context > 1:
        findings.add(
            f"plan '{plan}': images have no sequence, and convolutions are not split along tensor; use data, "
            "zero and pipeline",
            "plan",
        )
