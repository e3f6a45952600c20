"""The bench `largest-model`: how large a dense model one device trains, every weight of it, on real text.

A Llama without memory (`deferred`) gets its weights unit by unit, in bfloat16 without masters. Layers are
recomputed, and a unit is updated in the backward pass by Adafactor, whose state is small; so a step needs the
weights, and the gradients of one unit. What does not fit beside them lies in host memory
(offload=parameters). Fingerprints before and after show which weights the steps have changed.
"""

import dataclasses
import gc
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon import optim
from echelon.bench.compare import Row, Spread
from echelon.bench.footprint import peak_bytes
from echelon.data import Batches, open_corpus
from echelon.engine import Engine, parallelize
from echelon.fingerprint import fingerprint
from echelon.initialization import deferred
from echelon.models import ModelConfig, build, cross_entropy
from echelon.ownership import VALUE

_PLAN = "precision=bf16 masters=false recompute=full update=backward"
_OFFLOADED = f"{_PLAN} offload=parameters"
_VOCAB = 256  # bytes of text
_LEARNING_RATE = 2e-4
_STEPS = 6
_PREFETCH = 2
# Bytes on the device for each parameter of the largest unit: gradients, float32 copies; and other units.
_SPARE, _SPARE_OFFLOADED = 16, 28
_OTHER = 4 * 2**30  # bytes on the device for activations, statistics and the context


class Size(NamedTuple):
    """A model, the samples of a step, and how many bytes of weights stay on the device, if not what fits."""

    name: str
    config: ModelConfig
    samples: int
    resident_bytes: int | None = None


class Trained(NamedTuple):
    """What some steps of one model were like."""

    plan: str
    losses: list[float]
    seconds: list[float]  # of every step but the first
    start_seconds: float
    resident_bytes: int
    device_bytes: int  # at the peak
    host_bytes: int
    unchanged: list[str]  # weights that no step has changed


def bench(quick: bool, only: str = "") -> tuple[dict[str, Any], list[Row]]:
    """The largest models that one device trains: tokens/s, memory, losses, and that every weight changes."""
    chosen = [size for size in (_small() if quick else _sizes()) if only in size.name]
    trained = {size.name: train(size) for size in chosen}
    rows = [_row(size, trained[size.name]) for size in chosen]
    settings = {
        "models": {size.name: dataclasses.asdict(size.config) for size in chosen},
        "parameters": {size.name: size.config.num_parameters for size in chosen},
        "samples": {size.name: size.samples for size in chosen},
        "plans": {name: each.plan for name, each in trained.items()},
        "losses": {name: each.losses for name, each in trained.items()},
        "unchanged_weights": {name: each.unchanged for name, each in trained.items()},
        "optimizer": f"Adafactor, learning rate {_LEARNING_RATE}",
        "corpus": "stdlib, as bytes",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    return settings, rows


def _sizes() -> list[Size]:
    shape = ModelConfig(
        "llama", layers=71, width=8192, heads=64, kv_heads=8, ffn=28672, vocab=_VOCAB, sequence=1024
    )
    layers = {60: 71, 70: 82, 90: 105, 110: 129}
    return [
        Size(f"Llama {number} B", dataclasses.replace(shape, layers=count), samples=8)
        for number, count in layers.items()
    ]


def _small() -> list[Size]:
    shape = ModelConfig("llama", layers=4, width=32, heads=2, vocab=_VOCAB, sequence=32)
    return [
        Size("small", shape, 2),
        Size("small, half resident", shape, 2, resident_bytes=2 * 4 * 32**2 * 13),
    ]


def _row(size: Size, trained: Trained) -> Row:
    seconds = Spread.of(trained.seconds)
    figures = {
        "tokens_per_second": size.samples * size.config.sequence / seconds.median,
        "device_peak_bytes": float(trained.device_bytes),
        "host_bytes": float(trained.host_bytes),
        "resident_bytes": float(trained.resident_bytes),
        "start_seconds": trained.start_seconds,
        "first_loss": trained.losses[0],
        "last_loss": trained.losses[-1],
    }
    return Row(size.name, "echelon", "echelon", seconds, Spread(1.0, 1.0, 1.0), figures)


def train(size: Size) -> Trained:
    """A few steps of one model, from its initial values."""
    _forget_peak()
    begin = time.perf_counter()
    engine, resident = _make(size)
    with engine:
        start_seconds = time.perf_counter() - begin
        before = _fingerprints(engine)
        corpus = open_corpus("stdlib", vocab=_VOCAB)
        batches = Batches(corpus, size.samples, size.config.sequence, seed=0)
        losses, seconds = [], []
        for step in range(_STEPS):
            begin = time.perf_counter()
            losses.append(engine.step(batches.at(step)).loss)
            seconds.append(time.perf_counter() - begin)
        after = _fingerprints(engine)
        held = engine.mesh.boundary.storages().get("parameters", [])
        trained = Trained(
            plan=str(engine.plan),
            losses=losses,
            seconds=seconds[1:],
            start_seconds=start_seconds,
            resident_bytes=resident,
            device_bytes=peak_bytes(),
            host_bytes=sum(tensor.nbytes for tensor in held),
            unchanged=[name for name, number in before.items() if after[name] == number],
        )
        engine.close(restore=False)
    del engine
    gc.collect()
    return trained


def _make(size: Size) -> tuple[Engine, int]:
    """An engine, and how many bytes of its weights stay on the device."""
    torch.manual_seed(0)
    model = deferred(lambda: build(size.config))
    weights = 2 * size.config.num_parameters
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in model.layers())
    resident = _resident_bytes(weights, largest) if size.resident_bytes is None else size.resident_bytes
    options: dict[str, Any] = {}
    if resident < weights:
        options = {"resident_bytes": resident, "prefetch": _PREFETCH}
    plan = _OFFLOADED if options else _PLAN
    engine = parallelize(
        model, plan, optimizer=_adafactor, loss=cross_entropy, audit="off", check_every=0, **options
    )
    return engine, resident


def _resident_bytes(weights: int, largest: int) -> int:
    """How many bytes of weights can stay on the device, whose largest unit has so many parameters. A CPU has
    none to spare."""
    free = torch.cuda.mem_get_info()[0] - _OTHER if torch.cuda.is_available() else 0
    if weights + _SPARE * largest <= free:
        return weights
    return min(weights, max(0, free - _SPARE_OFFLOADED * largest))


def _adafactor(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return optim.Adafactor(parameters, lr=_LEARNING_RATE)


def _fingerprints(engine: Engine) -> dict[str, list[tuple[int, int]]]:
    """Of every weight; one in host memory visits the device for it."""
    engine.synchronize()
    found: dict[str, list[tuple[int, int]]] = {}
    for owned in engine.owned():
        if owned.slice.part == VALUE:
            found.setdefault(owned.slice.name, []).append(_fingerprint(owned.tensor, engine.mesh.device))
    return found


def _fingerprint(tensor: Tensor, device: torch.device) -> tuple[int, int]:
    return fingerprint(tensor.to(device))


def _forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
