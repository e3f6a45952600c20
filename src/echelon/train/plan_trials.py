"""What predictions of plans are held to: dry runs of a rank, and steps on ranks that are here.

Weights and tokens are made up, of the sizes that the prediction was for.
"""

import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from echelon.engine import parallelize
from echelon.engine.dry_run import DryRun, dry_run
from echelon.errors import UserError, did_you_mean
from echelon.launching import RankFailed, Ranks
from echelon.models import ModelConfig, build, cross_entropy, preset, presets, read_hf_config
from echelon.nn.initialization.initial_values import deferred
from echelon.plan import Plan

_WARM = 4  # the engine meters activations in its first three steps, which makes them slower


class Work(NamedTuple):
    """A step: the model, and sequences over all replicas."""

    config: ModelConfig
    batch: int
    sequence: int

    def tokens(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.zeros(samples, self.sequence, dtype=torch.int64)
        return tokens, tokens


class Trial(NamedTuple):
    """What a plan took on ranks that are here; or why it could not be run."""

    plan: str
    seconds: float | None
    peak: int | None
    error: str = ""


def config_of_model(name: str) -> ModelConfig:
    """The sizes of a preset, or of a folder of Hugging Face. A UserError says why it is only a shape."""
    path = Path(name)
    if name in presets():
        return preset(name)
    if not path.exists():
        raise UserError(
            f"'{name}' is only a shape, which cannot be built{did_you_mean(name, presets())}; drop --dry-run "
            "and --measure"
        )
    return read_hf_config(str(path if path.is_dir() else path.parent))


def dry_run_of(work: Work, text: str, rank: int) -> DryRun:
    """The steps of one rank of a plan, by the code that would run them."""
    plan = Plan.parse(text)
    batch = work.tokens(work.batch // plan.data)
    return dry_run(partial(build, work.config), plan, batch, optimizer=_adamw, loss=cross_entropy, rank=rank)


def try_plans(work: Work, plans: Iterable[str], steps: int = 5) -> list[Trial]:
    """Run each plan on ranks of its own, which end with it: what one leaves in memory, no other has."""
    return [_try(work, plan, steps) for plan in plans]


def _try(work: Work, text: str, steps: int) -> Trial:
    try:
        with Ranks(Plan.parse(text).ranks) as ranks:
            times = ranks.run(time_steps, work, text, steps)
    except (UserError, RankFailed) as error:
        return Trial(text, None, None, str(error).splitlines()[0])
    return Trial(text, max(seconds for seconds, _ in times), max(peak for _, peak in times))


def time_steps(work: Work, text: str, steps: int) -> tuple[float, int]:
    """The median seconds of a step, and the bytes at the peak, on one rank of a plan."""
    torch.manual_seed(0)
    model = deferred(partial(build, work.config))
    with parallelize(model, text, optimizer=_adamw, loss=cross_entropy, audit="off", check_every=0) as engine:
        batch = engine.local(work.tokens(work.batch))
        times = []
        for _ in range(_WARM + steps):
            start = time.perf_counter()
            float(engine.step(batch).loss)  # read, so that the step has ended
            times.append(time.perf_counter() - start)
        return median(times[_WARM:]), engine.memory().peak_total


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)
