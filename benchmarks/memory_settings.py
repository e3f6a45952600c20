"""The bench `memory`: the memory of one model by category, under ten settings, and what each costs in time.

Settings of one device take turns in one process, and those of two ranks in two, each beside the plain plan
with as many ranks. Bytes are peaks of `engine.memory()`, of the rank that needs the most.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.compare import Row, compare, slowest
from benchmarks.harness import alternate, measuring_ranks, timed
from echelon import optim
from echelon.engine import parallelize
from echelon.launching import TRAINING_MODULES, preload
from echelon.memory import CATEGORIES
from echelon.models import ModelConfig, cross_entropy
from echelon.plan import Plan
from echelon.train.rehearsal import make_batch, make_model

_FULL = ModelConfig("gpt", layers=12, width=128, heads=4, vocab=1024, sequence=256, tied=True)
_SMALL = ModelConfig("gpt", layers=4, width=32, heads=2, vocab=64, sequence=16, tied=True)
_SAMPLES = 4  # of all ranks together
_WARMUP = 4  # the engine meters activations in its first three steps, which makes them slower


class Setting(NamedTuple):
    """A plan, and the optimizer that it runs with."""

    plan: str
    optimizer: str = "AdamW"

    @property
    def name(self) -> str:
        return self.plan if self.optimizer == "AdamW" else f"{self.plan}, {self.optimizer}"


SETTINGS = (
    Setting("precision=bf16"),
    Setting("precision=bf16 microbatches=4"),
    Setting("precision=bf16 recompute=selective"),
    Setting("precision=bf16 recompute=sqrt"),
    Setting("precision=bf16 recompute=full"),
    Setting("precision=bf16 update=backward"),
    Setting("precision=bf16", "Adafactor"),
    Setting("precision=bf16 recompute=full update=backward masters=false", "Adafactor"),
    Setting("data=2 precision=bf16"),
    Setting("data=2 zero=1 precision=bf16"),
    Setting("data=2 zero=3 precision=bf16 recompute=full"),
)
_OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adafactor": optim.Adafactor,
}


class Measured(NamedTuple):
    """One rank's seconds by setting, one number per round, and its peak bytes by setting and category."""

    seconds: dict[str, list[float]]
    peaks: dict[str, dict[str, int]]


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """Memory by category and time of one model under ten settings: recompute, update, optimizer, ZeRO."""
    preload(*TRAINING_MODULES, __name__)
    config, rounds = (_SMALL, 2) if quick else (_FULL, 5)
    rows = [row for count in (1, 2) for row in _rows(count, config, rounds)]
    settings = {
        "model": dataclasses.asdict(config),
        "parameters": config.num_parameters,
        "samples": _SAMPLES,
        "rounds": rounds,
    }
    return settings, rows


def _rows(count: int, config: ModelConfig, rounds: int) -> list[Row]:
    chosen = [setting for setting in SETTINGS if Plan.parse(setting.plan).ranks == count]
    with measuring_ranks(count) as ranks:
        measured = ranks.run(measure, chosen, config, rounds)
    rows = compare("1 device" if count == 1 else f"{count} ranks", _slowest(measured), chosen[0].name)
    return [dataclasses.replace(row, extras=_peaks(measured, row.contender)) for row in rows]


def _slowest(measured: Sequence[Measured]) -> dict[str, list[float]]:
    return slowest([rank.seconds for rank in measured])


def _peaks(measured: Sequence[Measured], name: str) -> dict[str, float]:
    largest = max((rank.peaks[name] for rank in measured), key=lambda peaks: sum(peaks.values()))
    return {f"{category}_bytes": largest[category] for category in CATEGORIES}


def measure(settings: Sequence[Setting], config: ModelConfig, rounds: int) -> Measured:
    """Runs in every rank: one engine for each setting, in turn."""
    engines = {
        setting.name: parallelize(
            make_model(config), setting.plan, optimizer=_OPTIMIZERS[setting.optimizer], loss=cross_entropy
        )
        for setting in settings
    }
    batch = make_batch(config, _SAMPLES)
    works = {
        name: timed(partial(engine.step, engine.local(batch)), before=dist.barrier)
        for name, engine in engines.items()
    }
    seconds = alternate(works, rounds, warmup=_WARMUP)
    peaks = {name: engine.memory().peak for name, engine in engines.items()}
    for engine in engines.values():
        engine.close(restore=False)
    return Measured(seconds, peaks)
