"""The bench `recompute`: a training step in bf16 on one GPU, with each way to compute activations again.

`none` takes turns with each other way, two engines at a time, so that ratios are of the same minutes.
`activation_bytes` is what autograd keeps at the peak, `peak_bytes` the most that the engine took on the GPU.
SGD holds no state, so that two engines of 3 billion parameters fit on one GPU.
"""

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.compare import Row, compare
from benchmarks.harness import alternate, timed
from benchmarks.one_gpu import Batch, make_batch
from echelon.engine import Engine, parallelize
from echelon.models import ModelConfig, build, cross_entropy, preset

NONE = "none"
_OTHERS = ("selective", "full", "sqrt")
_STEPS = 1  # in a round
_WARMUP = 3  # rounds: the engine meters activations in its first three steps, which makes them slower
_ROUNDS = 4
_SMALL = ModelConfig("gpt", layers=2, width=32, heads=2, vocab=64, sequence=16, tied=True)


@dataclasses.dataclass(frozen=True)
class Size:
    """One model, and how many samples a step takes."""

    name: str
    config: ModelConfig
    samples: int


def bench(quick: bool, only: str = "") -> tuple[dict[str, Any], list[Row]]:
    """Recompute none, selective, full and sqrt: time, activations and peak memory."""
    sizes = [Size("small", _SMALL, 4)] if quick else _sizes()
    modes = (False,) if quick else (False, True)
    rows = [row for size in sizes for compiled in modes for row in _rows(size, compiled, only)]
    settings = {
        "models": {size.name: dataclasses.asdict(size.config) for size in sizes},
        "parameters": {size.name: size.config.num_parameters for size in sizes},
        "samples": {size.name: size.samples for size in sizes},
        "precision": "bf16",
        "optimizer": "SGD",
        "steps_per_round": _STEPS,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    return settings, rows


def _sizes() -> list[Size]:
    """GPT-2 of 1.5 billion parameters, and Llama 3.2 of 3 billion: 16384 tokens, as many as fit beside a
    second engine (129 GB with Llama)."""
    gpt = dataclasses.replace(preset("gpt-xl"), sequence=1024)
    llama = dataclasses.replace(
        preset("llama3-1b"), layers=28, width=3072, heads=24, ffn=8192, sequence=2048, rope_scaling=None
    )
    return [Size("GPT-2 1.5B", gpt, 16), Size("Llama 3B", llama, 8)]


def _rows(size: Size, compiled: bool, only: str) -> Iterator[Row]:
    """`none`, then each other way beside it. `only`: cases and contenders whose name has this text."""
    case = f"{size.name}, {'compiled' if compiled else 'eager'}"
    others = [other for other in _OTHERS if only in f"{case}, {other}"]
    if not others:
        return
    batch = make_batch(size.config, size.samples)
    none = Trainer(size.config, NONE, batch, compiled=compiled)
    for number, other in enumerate(others):
        trainers = {NONE: none, other: Trainer(size.config, other, batch, compiled=compiled)}
        samples = alternate(
            {name: trainer.timed for name, trainer in trainers.items()}, _ROUNDS, warmup=_WARMUP
        )
        tokens = size.samples * size.config.sequence * _STEPS
        for row in compare(case, samples, NONE):
            if row.contender != NONE or number == 0:
                yield dataclasses.replace(row, extras=trainers[row.contender].figures(tokens, row))
        trainers.pop(other).close()
    none.close()


class Trainer:
    """An engine, and the most memory that its steps took."""

    def __init__(self, config: ModelConfig, recompute: str, batch: Batch, *, compiled: bool) -> None:
        before = _allocated()
        plan = f"precision=bf16 recompute={recompute} compile={str(compiled).lower()}"
        self.engine: Engine = parallelize(
            _model(config), plan, optimizer=_sgd, loss=cross_entropy, audit="off"
        )
        self._resting = _allocated() - before
        self._batch, self._peak = batch, 0
        self.timed: Callable[[], float] = self._watched(timed(self._steps))

    def _steps(self) -> None:
        for _ in range(_STEPS):
            self.engine.step(self._batch)

    def _watched(self, sample: Callable[[], float]) -> Callable[[], float]:
        def watched() -> float:
            others = _allocated() - self._resting
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            seconds = sample()
            peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            self._resting = _allocated() - others  # masters and gradients are made in the first step
            self._peak = max(self._peak, peak - others)
            return seconds

        return watched

    def figures(self, tokens: int, row: Row) -> dict[str, float]:
        found = {
            "tokens_per_second": tokens / row.seconds.median,
            "activation_bytes": float(self.engine.memory().peak["activations"]),
        }
        return found | ({"peak_bytes": float(self._peak)} if torch.cuda.is_available() else {})

    def close(self) -> None:
        self.engine.close(restore=False)
        del self.engine, self.timed
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def _model(config: ModelConfig) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return build(config)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)
