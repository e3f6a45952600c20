"""The task of a training: a model, batches, a loss, and what to report of them.

`open_task` opens the task of a job, as every rank does. The loop, the logbook and the display never ask which
it is: each has the same members. `training` and `validation` are global batches by number, the same in every
layout; `at(step, part=(i, n))` gives the rows of replica i of n.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from echelon.data import (
    Batches,
    Corpus,
    ImageData,
    TrainingImages,
    ValidationImages,
    load_tokenizer,
    num_windows,
    open_corpus,
    open_images,
)
from echelon.engine.step.metrics import Measure
from echelon.errors import UserError, did_you_mean
from echelon.models import (
    ImageConfig,
    ImageModel,
    ModelConfig,
    Transformer,
    build,
    build_image,
    cross_entropy,
    generate,
    load_hf,
    load_image,
    num_parameters,
)
from echelon.nn.losses import IGNORED_TARGET
from echelon.plan import Plan
from echelon.train.jobs.job import Job
from echelon.train.runs.run_folder import explain_os_errors


def open_text(job: Job, vocab: int) -> Corpus:
    data, source = job.data, job.tokenizer
    tokenizer = None if source is None else load_tokenizer(source)
    return open_corpus(
        data.text_source,
        vocab=vocab,
        dtype=data.dtype,
        tokenizer=tokenizer,
        field=data.field,
        cache=data.cache,
    )


def make_batches(job: Job, corpus: Corpus) -> tuple[Batches, Batches | None]:
    """The batches to train on, and those to validate on.

    A validation split that is shorter than one training batch makes one smaller batch. With less than a
    sample per replica (or validation_fraction=0) there is no validation.
    """
    sequence, fraction = job.sequence_length, job.data.validation_fraction
    make = partial(Batches, corpus, sequence=sequence, seed=job.seed, validation_fraction=fraction)
    training = make(batch=job.batch)
    size = min(job.batch, num_windows(len(corpus), sequence, "validation", fraction))
    if size < Plan.parse(job.plan).data:
        return training, None
    return training, make(batch=size, split="validation")


SAMPLE_TOKENS = 300
TOKENIZER_FOLDER = "tokenizer"  # of a run
DEFAULT_EVALUATE_BATCHES = 4


@final
class LanguageTask:
    """The corpus of a job, and a model of its tokens."""

    unit = "tokens"  # that the loss counts
    measure: Measure | None = None  # of a validation beside the loss: right answers, as (total, count)
    loss: Callable[[Any, Any], tuple[Tensor, Tensor]] = staticmethod(cross_entropy)

    def __init__(self, job: Job) -> None:
        self.config = job.model.config()
        self._corpus = open_text(job, self.config.vocab)
        self.training, self.validation = make_batches(job, self._corpus)
        self.num_parameters = self.config.num_parameters
        self.data_name, self.data_size = self._corpus.name, self.training.tokens
        most = DEFAULT_EVALUATE_BATCHES if job.evaluate_batches is None else job.evaluate_batches
        self.num_validation_batches = (
            min(most, self.validation.num_batches) if self.validation is not None else 0
        )

    def build(self) -> Transformer:
        return build(self.config)

    def load(self, folder: str | Path) -> Transformer:
        return load_hf(folder)

    def sample(self, folder: Path) -> str:
        return sample(load_hf(folder), self._corpus)

    def keep_reader(self, folder: Path) -> None:
        if self._corpus.tokenizer is not None:
            with explain_os_errors(folder):
                self._corpus.tokenizer.save(folder)


def sample(model: Transformer, corpus: Corpus) -> str:
    """Return what the model writes after the first tokens of the corpus."""
    prompt = torch.from_numpy(corpus.tokens[:16].astype("int64"))
    tokens = generate(model, prompt, SAMPLE_TOKENS).numpy()
    return corpus.decode(tokens) if corpus.decode is not None else " ".join(map(str, tokens.tolist()))


SAMPLE_IMAGES = 16


@final
class ImageTask:
    """Opens the images of a job. Their classes are those of the model."""

    unit = "images"
    loss: Callable[[Any, Any], tuple[Tensor, Tensor]] = staticmethod(cross_entropy)

    def __init__(self, job: Job) -> None:
        data = open_data(job)
        self.config = job.model.image_config(data.class_names)
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
        """Return the numbers of right answers and of images; a label that does not count is never right."""
        return (output.argmax(dim=-1) == labels).sum(), (labels != IGNORED_TARGET).sum()

    def build(self) -> ImageModel:
        return build_image(self.config)

    def load(self, folder: str | Path) -> ImageModel:
        return load_image(folder)

    def keep_reader(self, folder: Path) -> None:
        """Images are read without one."""

    @torch.no_grad()
    def sample(self, folder: Path) -> str:
        """Return what the model says of the first images of the validation."""
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


def open_data(job: Job) -> ImageData:
    """The images of a job. Where it starts from weights, labels count classes as these do."""
    config = job.model.image_config()
    return open_images(
        job.data.image_source,
        config.image_size,
        validation_fraction=job.data.validation_fraction,
        known=config.class_names,
    )


Task = LanguageTask | ImageTask
TASKS: dict[str, type[LanguageTask] | type[ImageTask]] = {"language": LanguageTask, "images": ImageTask}


def config_of(job: Job) -> ModelConfig | ImageConfig:
    """The sizes of a job's model; of images, the classes are those of the data."""
    if job.task not in TASKS:
        raise UserError(f"task={job.task!r}: is not a task{did_you_mean(job.task, TASKS)}")
    return (
        job.model.config() if job.task == "language" else job.model.image_config(open_data(job).class_names)
    )


def open_task(job: Job) -> Task:
    """The task of a job: its data are opened, its model is not built yet."""
    return TASKS[job.task](job)
