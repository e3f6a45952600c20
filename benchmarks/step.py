"""The bench `step`: a training step of a small GPT, in echelon and in plain torch, one thread per rank.

On one device the peer is the usual loop; on two ranks it is DistributedDataParallel. `trainers` says what
each contender does.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from benchmarks import footprint, trainers
from benchmarks.compare import Row, compare, slowest
from benchmarks.harness import alternate, measuring_ranks, timed
from echelon.launching import TRAINING_MODULES, preload
from echelon.models import ModelConfig
from echelon.train.rehearsal import make_batch

_SAMPLES = 8  # per rank
_FULL = ModelConfig("gpt", layers=4, width=256, heads=4, vocab=1024, sequence=128, tied=True)
_SMALL = ModelConfig("gpt", layers=1, width=32, heads=2, vocab=64, sequence=16, tied=True)

# The engine meters activations in its first three steps, which makes them slower.
_WARMUP = 4
_MEMORY_STEPS = 3

_PEERS = {1: "torch loop", 2: "torch DDP"}  # by number of ranks


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """A training step of a small GPT, against a plain torch loop and DistributedDataParallel."""
    preload(*TRAINING_MODULES)
    config, rounds = (_SMALL, 3) if quick else (_FULL, 20)
    rows = [row for count in _PEERS for row in _rows(count, config, rounds)]
    settings = {
        "model": dataclasses.asdict(config),
        "parameters": config.num_parameters,
        "samples_per_rank": _SAMPLES,
        "precision": "fp32",
        "optimizer": "AdamW",
        "clip": trainers.CLIP,
        "rounds": rounds,
    }
    return settings, rows


def _rows(count: int, config: ModelConfig, rounds: int) -> list[Row]:
    with measuring_ranks(count) as ranks:
        samples = slowest(ranks.run(measure, config, rounds))
    case = "1 device" if count == 1 else f"{count} ranks, data={count}"
    return [
        dataclasses.replace(row, extras={"peak_bytes": _peak_bytes(count, row.contender, config)})
        for row in compare(case, samples, _PEERS[count])
    ]


def _peak_bytes(count: int, contender: str, config: ModelConfig) -> int:
    """In separate ranks, because a process never returns all the memory of the contender before."""
    with measuring_ranks(count) as ranks:
        return max(ranks.run(measure_memory, contender, config))


def measure(config: ModelConfig, rounds: int) -> dict[str, list[float]]:
    """Runs in every rank: seconds of each contender's step, taken in turn."""
    names = (_PEERS[dist.get_world_size()], "echelon")
    contenders = {name: timed(make_work(name, config), before=dist.barrier) for name in names}
    return alternate(contenders, rounds, warmup=_WARMUP)


def measure_memory(contender: str, config: ModelConfig) -> int:
    """Runs in every rank: by how much memory grew from before the model was built to after some steps."""
    make_work(contender, _SMALL)()  # what torch imports on first use, about 100 MiB, does not count
    before = footprint.peak_bytes()
    work = make_work(contender, config)
    for _ in range(_MEMORY_STEPS):
        work()
    return footprint.peak_bytes() - before


def make_work(contender: str, config: ModelConfig) -> Callable[[], tuple[float, float]]:
    """Build the contender's model; each call then trains one step and returns (loss, gradient norm)."""
    make_step = trainers.echelon_step if contender == "echelon" else trainers.torch_step
    return partial(make_step(config), make_batch(config, _SAMPLES))
