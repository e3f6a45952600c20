"""Images: a model that names the class of an image."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from echelon.data import ImageData, TrainingImages, ValidationImages, open_images
from echelon.models import ImageConfig, ImageModel, build_image, cross_entropy, load_image, num_parameters
from echelon.nn.losses import IGNORED_TARGET

if TYPE_CHECKING:
    from echelon.train.jobs.job import Job

SAMPLE_IMAGES = 16


@final
class ImageTask:
    """Opens the images of a job. Their classes are those of the model."""

    unit = "images"
    loss: Callable[[Any, Any], tuple[Tensor, Tensor]] = staticmethod(cross_entropy)

    def __init__(self, job: "Job") -> None:
        data = open_data(job)
        self.config = model_config(job, data)
        size, augment = self.config.image_size, job.data.augment is not False
        self.training = TrainingImages(data.training, job.batch, size, job.seed, augment)
        self.validation = ValidationImages(data.validation, job.batch, size) if len(data.validation) else None
        self.num_parameters = num_parameters(self.config)
        self.data_name, self.data_size = data.name, len(data.training)
        available = 0 if self.validation is None else self.validation.num_batches
        most = job.evaluate_batches
        self.num_validation_batches = available if most is None else min(most, available)

    @staticmethod
    def measure(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """How many images are named rightly, of how many; a label that does not count is never right."""
        return (output.argmax(dim=-1) == labels).sum(), (labels != IGNORED_TARGET).sum()

    def build(self) -> ImageModel:
        return build_image(self.config)

    def load(self, folder: str | Path) -> ImageModel:
        return load_image(folder)

    @torch.no_grad()
    def sample(self, folder: Path) -> str:
        """What the model says of the first images of the validation."""
        if self.validation is None:
            return ""
        model = load_image(folder).float().eval()
        images, labels = ValidationImages(
            self.validation.images, min(SAMPLE_IMAGES, len(self.validation.images)), self.config.image_size
        ).at(0)
        names = self.config.class_names
        answers = model(images).softmax(dim=-1)
        lines = [
            f"{names[label]}: {names[int(row.argmax())]} ({row.max():.0%})"
            for label, row in zip(labels.tolist(), answers, strict=True)
        ]
        return "\n".join(["what an image shows: what the model says", *lines])


def open_data(job: "Job") -> ImageData:
    """The images of a job. Where it starts from weights, labels count classes as these do."""
    config = job.model.image_config()
    return open_images(
        job.data.image_source,
        config.image_size,
        validation_fraction=job.data.validation_fraction,
        known=config.class_names,
    )


def model_config(job: "Job", data: ImageData) -> ImageConfig:
    """The sizes of the model for the classes of the data."""
    return job.model.image_config(data.class_names)
