"""A job: all settings of a training run, as plain data with defaults.

`Job()` is the embedded default: a small GPT on two ranks that learns the sources of the Python standard
library. job_file.py reads a TOML file into a Job, job_rules.py checks it, loop.py runs it.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

from echelon.data.tokenizer import has_tokenizer
from echelon.errors import UserError
from echelon.models import (
    ExpertsConfig,
    ImageConfig,
    ModelConfig,
    image_preset,
    preset,
    read_hf_config,
    read_image_config,
)
from echelon.plan import Plan
from echelon.update.nonfinite import Nonfinite, why_unskippable
from echelon.update.optim.learning_rate import Schedule, by_name

MEASURED_STEPS = 10  # of a training that ends by time
LANGUAGE_PRESET, TEXT_SOURCE = "gpt-tiny", "stdlib"
IMAGE_PRESET, IMAGE_SOURCE = "alexnet-tiny", "synthetic"


class _Table:
    """Only pydantic reads this: an unknown key is an error."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True)
class ExpertsJob(_Table):
    """Changes of the experts of the preset; or experts for a model that has none."""

    num_experts: int | None = None
    top_k: int | None = None
    hidden: int | None = None
    gate: str | None = None
    normalize: bool | None = None
    scale: float | None = None
    shared: int | None = None
    shared_gate: bool | None = None
    first_dense: int | None = None
    capacity: float | None = None
    groups: int | None = None
    group_top_k: int | None = None
    balance: float | None = None
    importance: float | None = None
    load: float | None = None
    z_loss: float | None = None
    bias_rate: float | None = None
    jitter: float | None = None

    def config(self, preset: ExpertsConfig | None) -> ExpertsConfig | None:
        changes = _given(self)
        if preset is not None:
            return dataclasses.replace(preset, **changes)
        missing = [name for name in ("num_experts", "top_k", "hidden") if changes and name not in changes]
        if missing:
            raise UserError(
                f"experts {', '.join(missing)}: must be set, because the preset has none; or use one that "
                "has experts (moe-tiny)"
            )
        return ExpertsConfig(**changes) if changes else None


@dataclass(frozen=True)
class ModelJob(_Table):
    """A preset, with changes; or the weights and sizes of a Hugging Face folder."""

    preset: str | None = None  # by the task
    weights: str | None = None
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    sequence: int | None = None
    tied: bool | None = None
    dropout: float | None = None
    head_width: int | None = None
    qk_norm: bool | None = None
    image_size: int | None = None  # of image models, like the divisor
    divisor: int | None = None
    experts: ExpertsJob = field(default_factory=ExpertsJob)

    def without_sizes(self) -> "ModelJob":
        return ModelJob(self.preset, self.weights)

    def config(self) -> ModelConfig:
        """The sizes: those of the Hugging Face folder, or of the preset with the job's changes."""
        changes = self._changes()
        if self.weights is None:
            named = preset(self.preset or LANGUAGE_PRESET)
            experts = self.experts.config(named.experts)
            return dataclasses.replace(named, experts=experts, **changes)
        self._refuse_changes([*changes, *(f"experts.{name}" for name in _given(self.experts))])
        return read_hf_config(self.weights)

    def image_config(self, class_names: tuple[str, ...] = ()) -> ImageConfig:
        """The same for an image model, which has these classes; of weights, their own."""
        changes = self._changes()
        if self.weights is None:
            if class_names:
                changes |= {"classes": len(class_names), "class_names": class_names}
            return dataclasses.replace(image_preset(self.preset or IMAGE_PRESET), **changes)
        self._refuse_changes(changes)
        return read_image_config(self.weights)

    def _changes(self) -> dict[str, Any]:
        others = ("preset", "weights", "experts")
        return {name: value for name, value in _given(self).items() if name not in others}

    def _refuse_changes(self, changes: Collection[str]) -> None:
        if changes:
            raise UserError(
                f"weights={self.weights} {', '.join(changes)}: config.json in the folder has the sizes; "
                f"leave {'it' if len(changes) == 1 else 'them'} out"
            )


def _given(table: ExpertsJob | ModelJob) -> dict[str, Any]:
    return {name: value for name, value in vars(table).items() if value is not None}


@dataclass(frozen=True)
class DataJob(_Table):
    """The source of tokens: `stdlib`, texts, JSON lines, Parquet, an Arrow folder, or a `.bin` token file. Or
    of images: `synthetic`, or a folder with one folder for each class."""

    source: str | None = None  # by the task
    tokenizer: str | None = None  # that of model.weights, if it has one; else the bytes of text
    field: str | None = None  # of a row's text
    cache: str | None = None  # folder of the tokens
    dtype: str | None = None
    validation_fraction: float = 0.05
    augment: bool | None = None  # of images: yes

    @property
    def text_source(self) -> str:
        return TEXT_SOURCE if self.source is None else self.source

    @property
    def image_source(self) -> str:
        return IMAGE_SOURCE if self.source is None else self.source


@dataclass(frozen=True)
class OptimizerJob(_Table):
    """The optimizer, its learning rate over the steps, and the bound on the gradient norm."""

    name: str = "adamw"
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.9
    clip: float | None = 1.0
    schedule: str = "cosine"
    warmup: int | None = None  # a tenth of the steps, at most 100
    decay: int | None = None
    floor: float | None = None


@dataclass(frozen=True)
class Job(_Table):
    """One training run. `batch` counts the samples of the global batch, over all replicas."""

    task: str = "language"
    plan: str = "data=2"
    steps: int = 600
    minutes: float | None = None  # fewer steps, if not all fit
    batch: int = 32
    sequence: int | None = None
    seed: int = 0
    evaluate_every: int = 100
    evaluate_batches: int | None = None  # 4; of images, all
    save_every: int = 100
    keep: int | Literal["memory"] = 2
    keep_every: int = 0
    restarts: int = 3
    out: str = "runs"
    name: str = "train"
    track: tuple[str, ...] | None = None  # trackers; TensorBoard, if it is installed
    trace: str | None = None  # '10:13': the steps 10, 11 and 12
    audit: str = "sampled"
    loss_scale: float | Literal["dynamic"] | None = None  # of fp16
    average: float | None = None  # decay of the moving average of the weights
    layers: str | None = None  # the list in the model that has its layers, if not as the model says
    nonfinite: str | None = None  # "skip", where the plan can
    most_skipped: int = 10
    spike_factor: float = 0.0
    spike_window: int = 50
    max_rollbacks: int = 3
    model: ModelJob = field(default_factory=ModelJob)
    data: DataJob = field(default_factory=DataJob)
    optimizer: OptimizerJob = field(default_factory=OptimizerJob)

    @property
    def sequence_length(self) -> int:
        return self.sequence or self.model.config().sequence

    @property
    def tokenizer(self) -> str | None:
        """The file or folder of the tokenizer; None: the bytes of text are its tokens."""
        if self.data.tokenizer is not None:
            return self.data.tokenizer
        weights = self.model.weights
        return weights if weights is not None and has_tokenizer(weights) else None

    @property
    def warmup(self) -> int:
        """For how many steps the learning rate rises."""
        if self.optimizer.warmup is not None:
            return self.optimizer.warmup
        most = (
            100 if self.minutes is None else 2 * MEASURED_STEPS
        )  # how many steps there are is not known yet
        return min(most, self.steps // 10)

    @property
    def trace_steps(self) -> range:
        """The steps whose instructions are recorded; a ValueError if `trace` does not name any."""
        if self.trace is None:
            return range(0)
        begin, colon, end = self.trace.partition(":")
        steps = range(int(begin), int(end))
        if not colon or steps.start < 1 or not steps or steps.start > self.steps:
            raise ValueError(self.trace)
        return steps

    @property
    def engine_nonfinite(self) -> Nonfinite:
        """The engine's treatment of steps that are not finite. Where the plan cannot leave them out, the loop
        ends the training."""
        can_skip = why_unskippable(Plan.parse(self.plan)) is None
        return cast(Nonfinite, self.nonfinite or "skip") if can_skip else "allow"

    def schedule(self) -> Schedule:
        optimizer = self.optimizer
        return by_name(
            optimizer.schedule, self.steps, self.warmup, decay=optimizer.decay, floor=optimizer.floor
        )


def as_plain(job: Job) -> dict[str, Any]:
    """The job as dicts of plain values, without those that are None, and without empty tables."""

    def keep(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in items if value is not None and value != {}}

    return dataclasses.asdict(job, dict_factory=keep)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """flat({"a": {"b": 1}}) == {"a.b": 1}"""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
