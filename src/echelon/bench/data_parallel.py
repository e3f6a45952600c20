"""The bench `data-parallel`: a training step of a GPT on two ranks at each level of ZeRO, beside its peers.

A case compares echelon, one peer that shards the same at that level, and the same compute without
communication. They take turns step by step in the same ranks. `replicas` says what each does. The losses of
the first steps must agree, or there is no result.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from echelon.bench import footprint, replicas
from echelon.bench.compare import Row, compare, slowest
from echelon.bench.harness import alternate, measuring_ranks, timed
from echelon.bench.replicas import Peer
from echelon.bench.trainers import make_batch
from echelon.launching import TRAINING_MODULES, preload
from echelon.models import ModelConfig

_RANKS = 2
_SAMPLES = 2  # per rank
_FULL = ModelConfig("gpt", layers=6, width=512, heads=8, vocab=256, sequence=128, tied=True)
_SMALL = ModelConfig("gpt", layers=1, width=32, heads=2, vocab=64, sequence=16, tied=True)

# The engine meters activations in its first three steps, which makes them slower.
_WARMUP = 4
_MEMORY_STEPS = 3

_COMPUTE_ONLY, _ECHELON = "compute only", "echelon"
_PRELOADED = ("echelon.bench.data_parallel", "torch.distributed.fsdp", "torch.distributed.optim")

# Float32 sums in another order differ by this much of a loss after some steps of AdamW.
_ROUNDING = 1e-3


class Measured(NamedTuple):
    """One rank's seconds by contender, one number per round, and its losses, one number per step."""

    seconds: dict[str, list[float]]
    losses: dict[str, list[float]]


class Work(NamedTuple):
    """A contender's training: `train` does one step on this rank's data and returns the loss."""

    train: Callable[[], float]
    close: Callable[[], None] = lambda: None


class Footprint(NamedTuple):
    """By how much one rank's memory grew: at its peak, and in tensors that stay alive between steps."""

    peak: int
    state: int


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """A training step of a GPT on 2 ranks at ZeRO 0 to 3, against DDP, FSDP2 and DeepSpeed."""
    preload(*TRAINING_MODULES, *_PRELOADED)
    config, rounds = (_SMALL, 2) if quick else (_FULL, 15)
    installed = [peer for peer in replicas.peers() if peer.installed]
    rows = [row for peer in installed for row in _rows(peer, config, rounds)]
    settings = {
        "model": dataclasses.asdict(config),
        "parameters": config.num_parameters,
        "ranks": _RANKS,
        "samples_per_rank": _SAMPLES,
        "precision": "fp32",
        "optimizer": "AdamW, fused",
        "clip": None,
        "rounds": rounds,
        "not_installed": sorted({peer.package for peer in replicas.peers() if not peer.installed}),
    }
    return settings, rows


def _rows(peer: Peer, config: ModelConfig, rounds: int) -> list[Row]:
    with measuring_ranks(_RANKS) as ranks:
        measured = ranks.run(measure, peer, config, rounds)
    check_equal(peer, [rank.losses for rank in measured])
    rows = compare(f"zero={peer.level}", slowest([rank.seconds for rank in measured]), peer.name)
    return [dataclasses.replace(row, extras=_extras(row, peer, config)) for row in rows]


def _extras(row: Row, peer: Peer, config: ModelConfig) -> dict[str, float]:
    """The memory of the rank that needs the most, measured in separate ranks."""
    if row.contender == _COMPUTE_ONLY:
        return {}
    with measuring_ranks(_RANKS) as ranks:
        footprints = ranks.run(measure_memory, row.contender, peer, config)
    return {
        "peak_bytes": max(rank.peak for rank in footprints),
        "state_bytes": max(rank.state for rank in footprints),
    }


def measure(peer: Peer, config: ModelConfig, rounds: int) -> Measured:
    """Runs in every rank: the contenders of one case, in turn."""
    losses: dict[str, list[float]] = {name: [] for name in (_COMPUTE_ONLY, peer.name, _ECHELON)}
    contenders = {
        name: timed(partial(_train, make_work(name, peer, config).train, history), before=dist.barrier)
        for name, history in losses.items()
    }
    return Measured(alternate(contenders, rounds, warmup=_WARMUP), losses)


def measure_memory(contender: str, peer: Peer, config: ModelConfig) -> Footprint:
    """Runs in every rank: by how much memory grew from before the model was built to after some steps."""
    warmup = make_work(contender, peer, _SMALL)  # imports, threads and buffers between ranks do not count
    warmup.train()
    peak, state = footprint.peak_bytes(), footprint.alive_bytes()
    warmup.close()
    work = make_work(contender, peer, config)
    for _ in range(_MEMORY_STEPS):
        work.train()
    return Footprint(footprint.peak_bytes() - peak, footprint.alive_bytes() - state)


def make_work(contender: str, peer: Peer, config: ModelConfig) -> Work:
    """Build the contender's model, and this rank's data."""
    batch = make_batch(config, _SAMPLES, seed=dist.get_rank())
    if contender == _ECHELON:
        engine = replicas.make_engine(config, peer.level)
        return Work(lambda: engine.step(batch).loss, engine.close)
    step = replicas.compute_only_step(config) if contender == _COMPUTE_ONLY else peer.make_step(config)
    return Work(partial(step, batch))


def _train(work: Callable[[], float], losses: list[float]) -> None:
    losses.append(work())


def check_equal(peer: Peer, ranks: Sequence[dict[str, list[float]]]) -> None:
    """Raise unless echelon and `peer` had the same losses over the global batch in their first steps."""
    echelon_losses, peer_losses = (_global_losses(name, ranks) for name in (_ECHELON, peer.name))
    if not all(
        math.isclose(*pair, rel_tol=_ROUNDING) for pair in zip(echelon_losses, peer_losses, strict=True)
    ):
        raise RuntimeError(
            f"zero={peer.level}: the losses of echelon and {peer.name} differ: "
            f"{echelon_losses}, {peer_losses}"
        )


def _global_losses(contender: str, ranks: Sequence[dict[str, list[float]]]) -> list[float]:
    """A peer reports the loss of a rank's own samples, echelon that of all: their means over ranks agree."""
    steps = zip(*(losses[contender][:_WARMUP] for losses in ranks), strict=True)
    return [sum(losses) / len(losses) for losses in steps]
