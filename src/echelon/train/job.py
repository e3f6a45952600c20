"""A job: everything a training run is told, as plain data with a default for each.

`Job()` is the embedded default: a small GPT on two ranks that learns the Python standard library's sources.
How a TOML file becomes a Job is job_file.py's; what a job does is loop.py's.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from echelon.errors import UserError, did_you_mean, raise_faults
from echelon.models import ModelConfig, preset, read_hf_config
from echelon.optim.schedules import Schedule, by_name
from echelon.plan import Plan

T = TypeVar("T")

OPTIMIZERS = ("adamw", "sgd")

# Read by pydantic alone: an unknown key is a fault, not silence.
_FORBID_EXTRA = {"extra": "forbid"}


@dataclass(frozen=True)
class ModelJob:
    """A preset, changed where a value is given; or the weights and sizes of a Hugging Face folder."""

    __pydantic_config__: ClassVar[dict[str, str]] = _FORBID_EXTRA

    preset: str = "gpt-tiny"
    weights: str | None = None
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    sequence: int | None = None
    tied: bool | None = None

    def config(self) -> ModelConfig:
        """The sizes: those of the Hugging Face folder, or the preset's with what the job changes."""
        changes = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name not in ("preset", "weights") and value is not None
        }
        if self.weights is None:
            return dataclasses.replace(preset(self.preset), **changes)
        if changes:
            raise UserError(
                f"weights={self.weights} {', '.join(changes)}: the folder's config.json says the sizes; "
                f"leave {'it' if len(changes) == 1 else 'them'} out"
            )
        return read_hf_config(self.weights)


@dataclass(frozen=True)
class DataJob:
    """Where tokens come from: `stdlib`, a text file, a folder of them, or a `.bin` token file."""

    __pydantic_config__: ClassVar[dict[str, str]] = _FORBID_EXTRA

    source: str = "stdlib"
    dtype: str | None = None
    validation_fraction: float = 0.05


@dataclass(frozen=True)
class OptimizerJob:
    """The optimizer, its learning rate over the steps, and the bound on the gradient norm."""

    __pydantic_config__: ClassVar[dict[str, str]] = _FORBID_EXTRA

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
class Job:
    """One training run. `batch` counts the samples of the global batch, over all replicas."""

    __pydantic_config__: ClassVar[dict[str, str]] = _FORBID_EXTRA

    plan: str = "data=2"
    steps: int = 600
    batch: int = 32
    sequence: int | None = None
    seed: int = 0
    evaluate_every: int = 100
    evaluate_batches: int = 4
    out: str = "runs"
    name: str = "train"
    model: ModelJob = field(default_factory=ModelJob)
    data: DataJob = field(default_factory=DataJob)
    optimizer: OptimizerJob = field(default_factory=OptimizerJob)

    @property
    def sequence_length(self) -> int:
        return self.sequence or self.model.config().sequence

    def schedule(self) -> Schedule:
        its = self.optimizer
        warmup = min(100, self.steps // 10) if its.warmup is None else its.warmup
        return by_name(its.schedule, self.steps, warmup, decay=its.decay, floor=its.floor)


def check(job: Job) -> None:
    """Raise one UserError with every fault that can be seen without opening a file or starting a rank."""
    faults = [*_count_faults(job), *_optimizer_faults(job.optimizer)]
    plan = _attempt(lambda: Plan.parse(job.plan), "plan", faults)
    config = _attempt(job.model.config, "model", faults)
    _attempt(job.schedule, "optimizer.schedule", faults)
    if plan is not None and job.batch < plan.data:
        faults.append(f"batch={job.batch} plan={plan}: every replica needs a sample; set batch={plan.data}")
    if config is not None and job.sequence is not None and job.sequence > config.sequence:
        faults.append(
            f"sequence={job.sequence}: the model reads at most {config.sequence} tokens; "
            f"set model.sequence={job.sequence} too"
        )
    raise_faults("the job", faults)


def _attempt(make: Callable[[], T], where: str, faults: list[str]) -> T | None:
    """What `make` makes; where it refuses, its faults are added under `where`."""
    try:
        return make()
    except UserError as error:
        faults.extend(f"{where}: {fault}" for fault in error.faults or (error.title,))
        return None


def _count_faults(job: Job) -> list[str]:
    least = {"steps": 1, "batch": 1, "evaluate_every": 0, "evaluate_batches": 1, "seed": 0}
    faults = [
        f"{name}={getattr(job, name)}: must be at least {bound}"
        for name, bound in least.items()
        if getattr(job, name) < bound
    ]
    if job.sequence is not None and job.sequence < 1:
        faults.append(f"sequence={job.sequence}: must be at least 1")
    if "/" in job.name or not job.name:
        faults.append(f"name={job.name!r}: must be one word for a folder; put folders into out")
    return faults


def _optimizer_faults(its: OptimizerJob) -> list[str]:
    faults = []
    if its.name not in OPTIMIZERS:
        faults.append(f"optimizer.name={its.name}: is unknown{did_you_mean(its.name, OPTIMIZERS)}")
    if not its.learning_rate > 0:
        faults.append(f"optimizer.learning_rate={its.learning_rate}: must be above 0")
    if its.clip is not None and not its.clip > 0:
        faults.append(f"optimizer.clip={its.clip}: must be above 0, or left out")
    if not all(0 <= beta < 1 for beta in its.betas):
        faults.append(f"optimizer.betas={list(its.betas)}: each must be at least 0 and below 1")
    return faults


def as_plain(job: Job) -> dict[str, Any]:
    """The job as dicts of plain values, without what is left at None."""

    def keep(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in items if value is not None}

    return dataclasses.asdict(job, dict_factory=keep)
