"""The bench `offload-activations`: GPT-2 of 1.5 billion parameters in bf16 on one GPU, at 4 times the batch
whose activations a GPU of 32 GiB keeps: what layers save in host memory, or computed again.

`recompute=selective` takes turns with each other plan, two engines at a time. `host_bytes` is what the engine
holds in host memory.
"""

import dataclasses
import gc
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.compare import Row, compare
from benchmarks.harness import alternate, tell, timed
from benchmarks.one_gpu import Batch, make_batch
from echelon.engine import Engine, parallelize
from echelon.models import ModelConfig, build, cross_entropy, preset
from echelon.quantities import show_seconds

BASELINE = "recompute=selective"
OTHERS = (
    "offload=activations",
    "recompute=full",
    "offload=activations recompute=full",
)
_WARMUP, _ROUNDS = 1, 2  # steps, of seconds; the first one takes memory of the host
_SMALL = ModelConfig("gpt", layers=2, width=32, heads=2, vocab=64, sequence=16, tied=True)
_SAMPLES = 24  # 2.55 GiB each: 6 fit on a GPU of 32 GiB, beside weights and gradients


def bench(quick: bool, only: str = "") -> tuple[dict[str, Any], list[Row]]:
    """Activations in host memory, or computed again: time, activations on the GPU and bytes of the host."""
    config = _SMALL if quick else dataclasses.replace(preset("gpt-xl"), sequence=1024)
    samples = 8 if quick else _SAMPLES
    rows = list(_rows("small" if quick else "GPT-2 1.5B", config, samples, only))
    settings = {
        "model": dataclasses.asdict(config),
        "parameters": config.num_parameters,
        "samples": samples,
        "precision": "bf16",
        "optimizer": "SGD",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    return settings, rows


def _rows(case: str, config: ModelConfig, samples: int, only: str) -> Iterator[Row]:
    """`only`: plans with this text."""
    batch, tokens = make_batch(config, samples), samples * config.sequence
    others = [plan for plan in OTHERS if only in f"{case}, {plan}"]
    if not others:
        return
    baseline = Trainer(config, BASELINE, batch)
    for number, other in enumerate(others):
        begin = time.perf_counter()
        trainers = {BASELINE: baseline, other: Trainer(config, other, batch)}
        contenders = {plan: timed(trainer.step) for plan, trainer in trainers.items()}
        times = alternate(contenders, _ROUNDS, warmup=_WARMUP)
        for row in compare(case, times, BASELINE):
            if row.contender != BASELINE or number == 0:
                yield dataclasses.replace(row, extras=trainers[row.contender].figures(tokens, row))
        trainers.pop(other).close()
        shown = ", ".join(map(show_seconds, times[other]))
        tell("offload-activations", f"{other}: {shown}; {show_seconds(time.perf_counter() - begin)} in all")
    baseline.close()


class Trainer:
    """An engine on one batch."""

    def __init__(self, config: ModelConfig, plan: str, batch: Batch) -> None:
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = build(config)
        self._batch = batch
        self.engine: Engine = parallelize(
            model, f"precision=bf16 {plan}", optimizer=_sgd, loss=cross_entropy, audit="off"
        )

    def step(self) -> None:
        self.engine.step(self._batch)

    def figures(self, tokens: int, row: Row) -> dict[str, float]:
        held = self.engine.mesh.boundary.storages().get("activations", [])
        return {
            "tokens_per_second": tokens / row.seconds.median,
            "activation_bytes": float(self.engine.memory().peak["activations"]),
            "host_bytes": float(sum(piece.nbytes for piece in held)),
        }

    def close(self) -> None:
        self.engine.close(restore=False)
        del self.engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)
