"""The bench `largest-model`: how large a dense model one device trains, every weight of it, on real text.

A Llama without memory (`deferred`) gets its weights unit by unit, in bfloat16 without masters. Layers are
recomputed, and a unit is updated in the backward pass by Adafactor, whose state is small; so a step needs the
weights, and the gradients of one unit. What does not fit beside them lies in host memory
(offload=parameters). Fingerprints before and after show which weights the steps have changed.

What happens is told on stderr, and where the bytes are if the device has none left; then half of the samples
are tried.
"""

import dataclasses
import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.compare import Row, Spread
from benchmarks.footprint import largest_pieces, peak_bytes
from benchmarks.harness import tell
from echelon import optim
from echelon.collectives.agreement import fingerprint
from echelon.data import Batches, open_corpus
from echelon.engine import Engine, parallelize
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.initialization.initial_values import deferred
from echelon.quantities import show_bytes, show_seconds
from echelon.state.ownership import VALUE

_PLAN = "precision=bf16 masters=false recompute=full update=backward"
_OFFLOADED = f"{_PLAN} offload=parameters"
_VOCAB = 256  # bytes of text
_LEARNING_RATE = 2e-4
_STEPS = 6
_PREFETCH = 2
# Bytes of a number: weights and activations are bfloat16, gradients and what an update computes float32.
_SHORT, _LONG = 2, 4
_OTHER = 3 * 2**30  # bytes on the device for workspaces, statistics, and gaps between pieces of memory
_FEWEST_SAMPLES = 2


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
    found = [_train_what_fits(size) for size in chosen]
    chosen = [size for size, _ in found]
    trained = {size.name: each for size, each in found}
    rows = [_row(*each) for each in found]
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


def _train_what_fits(size: Size) -> tuple[Size, Trained]:
    """With all samples, or as many as there is memory for."""
    while True:
        try:
            return size, train(size)
        except torch.OutOfMemoryError:
            if size.samples < 2 * _FEWEST_SAMPLES:
                raise
        size = size._replace(samples=size.samples // 2)
        _tell(f"trying {size.samples} samples")
        gc.collect()


def train(size: Size) -> Trained:
    """A few steps of one model, from its initial values."""
    _forget_peak()
    begin = time.perf_counter()
    _tell(f"{size.name}: {size.samples} samples, weights of {show_bytes(_weight_bytes(size.config))}")
    engine, resident = _make(size)
    with engine, _memory_told(engine):
        start_seconds = time.perf_counter() - begin
        _tell(f"started in {show_seconds(start_seconds)} with {engine.plan}, {_on_device()}")
        before = _fingerprints(engine)
        corpus = open_corpus("stdlib", vocab=_VOCAB)
        batches = Batches(corpus, size.samples, size.config.sequence, seed=0)
        losses, seconds = [], []
        for step in range(_STEPS):
            begin = time.perf_counter()
            losses.append(engine.step(batches.at(step)).loss)
            seconds.append(time.perf_counter() - begin)
            _tell(f"step {step}: {show_seconds(seconds[-1])}, loss {losses[-1]:.3f}, {_on_device()}")
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
    weights = _weight_bytes(size.config)
    resident = _resident_bytes(size) if size.resident_bytes is None else size.resident_bytes
    options: dict[str, Any] = {}
    if resident < weights:
        options = {"resident_bytes": resident, "prefetch": _PREFETCH}
    plan = _OFFLOADED if options else _PLAN
    engine = parallelize(
        model, plan, optimizer=_adafactor, loss=cross_entropy, audit="off", check_every=0, **options
    )
    return engine, resident


def _weight_bytes(config: ModelConfig) -> int:
    return _SHORT * config.num_parameters


def _resident_bytes(size: Size) -> int:
    """How many bytes of weights can stay on the device. A CPU has none to spare."""
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    weights = _weight_bytes(size.config)
    if weights + step_bytes(size.config, size.samples, offloaded=False) <= free:
        return weights
    return min(weights, max(0, free - step_bytes(size.config, size.samples, offloaded=True)))


def step_bytes(config: ModelConfig, samples: int, *, offloaded: bool) -> int:
    """At most so many bytes a step needs beside resident weights: inputs of all layers, which are kept; what
    one layer computes again; gradients of one unit, and the copies that its update works on; two float32
    matrices of the optimizer; and other units, if weights are in host memory."""
    tokens = samples * config.sequence
    two, one = (dataclasses.replace(config, layers=number).num_parameters for number in (2, 1))
    unit = two - one
    inputs = _SHORT * config.layers * tokens * config.width
    layer = _SHORT * tokens * (10 * config.width + 5 * config.ffn_width)
    update = 2 * _LONG * unit + 2 * _LONG * config.width * config.ffn_width
    others = _SHORT * (_PREFETCH + 1) * unit if offloaded else 0
    return inputs + layer + update + others + _OTHER


@contextmanager
def _memory_told(engine: Engine) -> Iterator[None]:
    """If the device has no more memory, tell what holds it."""
    try:
        yield
    except torch.OutOfMemoryError:
        memory = engine.memory()
        now = ", ".join(f"{name} {show_bytes(size)}" for name, size in memory.now.items())
        host = ", ".join(f"{name} {show_bytes(size)}" for name, size in memory.host.items())
        _tell(f"out of memory with {_on_device()}; held: {now}; in host memory: {host}")
        _tell(f"the most of the pieces of memory: {', '.join(largest_pieces())}")
        raise


def _on_device() -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    return f"{show_bytes(now)} on the device, {show_bytes(peak)} at the peak"


def _tell(text: str) -> None:
    tell("largest-model", text)


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
