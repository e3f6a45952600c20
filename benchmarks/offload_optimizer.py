"""The bench `offload-optimizer`: a training step in bf16 on one GPU, with the optimizer there or on the host.

Engines run one after the other: two of 7 billion parameters do not fit on one GPU. `none` updates in its
backward pass too, or its gradients would not fit beside masters and moments. `host_update_seconds` is how
long the thread on the host works in a step.
"""

import dataclasses
import gc
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.compare import Row, compare
from benchmarks.harness import tell, timed
from benchmarks.one_gpu import make_batch
from echelon.engine import Engine, parallelize
from echelon.models import ModelConfig, build, cross_entropy, preset
from echelon.quantities import show_seconds
from echelon.update.offload.host_twins import HostTwins

# By contender. With update=step all gradients are on the host at once: in bf16, to leave room for the rest.
PLANS = {
    "none": "update=backward",
    "offload, update=backward": "offload=optimizer update=backward",
    "offload, update=step": "offload=optimizer gradients=same",
    "offload, delay=1": "offload=optimizer gradients=same delay=1",
}
_WARMUP, _ROUNDS = 2, 3  # steps, of seconds; the first one takes memory
_SMALL = ModelConfig("llama", layers=2, width=32, heads=2, vocab=64, sequence=16, kv_heads=None, ffn=64)


@dataclasses.dataclass(frozen=True)
class Size:
    """One model, and how many samples a step takes."""

    name: str
    config: ModelConfig
    samples: int


def bench(quick: bool, only: str = "") -> tuple[dict[str, Any], list[Row]]:
    """AdamW's state and update on the GPU or on its host, for a Llama of 7 billion parameters. `only`:
    contenders with this text, beside the baseline."""
    large = dataclasses.replace(preset("llama2-7b"), sequence=2048)
    size = Size("small", _SMALL, 4) if quick else Size("Llama 7B", large, 16)
    chosen = {name: plan for name, plan in PLANS.items() if only in name or name == "none"}
    plans = {name: f"precision=bf16 recompute=full {plan}" for name, plan in chosen.items()}
    samples, figures = {}, {}
    for name, plan in plans.items():
        begin = time.perf_counter()
        samples[name], figures[name] = _measure(size, plan)
        shown = ", ".join(map(show_seconds, samples[name]))
        tell(
            "offload-optimizer",
            f"{name}: steps of {shown}; {show_seconds(time.perf_counter() - begin)} in all",
        )
    rows = compare(size.name, samples, next(iter(samples))) if samples else []
    settings = {
        "models": {size.name: dataclasses.asdict(size.config)},
        "parameters": {size.name: size.config.num_parameters},
        "tokens": size.samples * size.config.sequence,
        "plans": plans,
        "optimizer": "AdamW",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    tokens = size.samples * size.config.sequence
    return settings, [
        dataclasses.replace(
            row, extras={"tokens_per_second": tokens / row.seconds.median} | figures[row.contender]
        )
        for row in rows
    ]


def _measure(size: Size, plan: str) -> tuple[list[float], dict[str, float]]:
    """Seconds of each step, and further figures."""
    engine: Engine = parallelize(
        _model(size.config), plan, optimizer=_adamw, loss=cross_entropy, audit="off", check_every=0
    )
    batch = make_batch(size.config, size.samples)
    sample = timed(partial(engine.step, batch))
    for _ in range(_WARMUP):
        sample()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with _HostTime() as host:
        seconds = [sample() for _ in range(_ROUNDS)]
        engine.synchronize()
    memory = engine.memory()
    figures = {
        "host_bytes": float(sum(memory.host.values())),
        "host_update_seconds": host.seconds / _ROUNDS,
    }
    if torch.cuda.is_available():
        figures["peak_bytes"] = float(torch.cuda.max_memory_allocated())
    engine.close(restore=False)
    del engine, sample
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return seconds, figures


class _HostTime:
    """The seconds in which twins are updated, while this is open."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._update = HostTwins.update

    def __enter__(self) -> "_HostTime":
        def measured(twins: HostTwins, *args: Any) -> None:
            start = time.perf_counter()
            self._update(twins, *args)
            self.seconds += time.perf_counter() - start

        HostTwins.update = measured  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        HostTwins.update = self._update  # type: ignore[method-assign]


def _model(config: ModelConfig) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return build(config).bfloat16() if torch.cuda.is_available() else build(config)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-5)
