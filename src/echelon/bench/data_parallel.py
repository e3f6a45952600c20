"""The bench `data-parallel`: a training step of a GPT on two ranks at each level of ZeRO, beside its peers.

A case is echelon, one peer that shares out the same at that level, and the same compute without exchange;
they take turns step by step in the same ranks. What each does is in `replicas`. It compares equals: losses
of the first steps must agree, or there is no result.
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
_SAMPLES = 2  # a rank
_FULL = ModelConfig("gpt", layers=6, width=512, heads=8, vocab=256, sequence=128, tied=True)
_SMALL = ModelConfig("gpt", layers=1, width=32, heads=2, vocab=64, sequence=16, tied=True)

# The engine meters activations in its first three steps, which makes them slower.
_WARMUP = 4
_MEMORY_STEPS = 3

_ALONE, _ECHELON = "compute alone", "echelon"
_PRELOADED = ("echelon.bench.data_parallel", "torch.distributed.fsdp", "torch.distributed.optim")

# Float32 sums in another order differ by this much of a loss after some steps of AdamW.
_ROUNDING = 1e-3


class Measured(NamedTuple):
    """One rank's seconds by contender, a number a round, and its losses, a number a step."""

    seconds: dict[str, list[float]]
    losses: dict[str, list[float]]


class Footprint(NamedTuple):
    """How far one rank's memory grew: at its peak, and by what is alive between two steps."""

    peak: int
    state: int


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """A training step of a GPT on 2 ranks at ZeRO 0 to 3, against DDP, FSDP2 and DeepSpeed."""
    preload(*TRAINING_MODULES, *_PRELOADED)
    config, rounds = (_SMALL, 2) if quick else (_FULL, 15)
    there = [peer for peer in replicas.peers() if peer.installed]
    rows = [row for peer in there for row in _rows(peer, config, rounds)]
    settings = {
        "model": dataclasses.asdict(config),
        "parameters": config.num_parameters,
        "ranks": _RANKS,
        "samples_a_rank": _SAMPLES,
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
    """Memory, measured in ranks of its own, of the fullest rank."""
    if row.contender == _ALONE:
        return {}
    with measuring_ranks(_RANKS) as ranks:
        told = ranks.run(measure_memory, row.contender, peer, config)
    return {"peak_bytes": max(rank.peak for rank in told), "state_bytes": max(rank.state for rank in told)}


def measure(peer: Peer, config: ModelConfig, rounds: int) -> Measured:
    """Runs in every rank: the contenders of one case, in turn."""
    losses: dict[str, list[float]] = {name: [] for name in (_ALONE, peer.name, _ECHELON)}
    contenders = {
        name: timed(partial(_train, make_work(name, peer, config), kept), before=dist.barrier)
        for name, kept in losses.items()
    }
    return Measured(alternate(contenders, rounds, warmup=_WARMUP), losses)


def measure_memory(contender: str, peer: Peer, config: ModelConfig) -> Footprint:
    """Runs in every rank: how far memory grew from before the model was built to after some steps."""
    make_work(contender, peer, _SMALL)()  # what is imported or started on first use does not count
    peak, state = footprint.peak_bytes(), footprint.alive_bytes()
    work = make_work(contender, peer, config)
    for _ in range(_MEMORY_STEPS):
        work()
    return Footprint(footprint.peak_bytes() - peak, footprint.alive_bytes() - state)


def make_work(contender: str, peer: Peer, config: ModelConfig) -> Callable[[], float]:
    """Build the contender's model; each call then trains one step on this rank's data: returns its loss."""
    if contender == _ECHELON:
        step = replicas.echelon_step(config, peer.level)
    else:
        step = replicas.alone_step(config) if contender == _ALONE else peer.make_step(config)
    return partial(step, make_batch(config, _SAMPLES, seed=dist.get_rank()))


def _train(work: Callable[[], float], losses: list[float]) -> None:
    losses.append(work())


def check_equal(peer: Peer, ranks: Sequence[dict[str, list[float]]]) -> None:
    """Raise unless echelon and `peer` had the same losses over the global batch in their first steps."""
    mine, theirs = (_global_losses(name, ranks) for name in (_ECHELON, peer.name))
    if not all(math.isclose(*pair, rel_tol=_ROUNDING) for pair in zip(mine, theirs, strict=True)):
        raise RuntimeError(
            f"zero={peer.level} of echelon and {peer.name} are no equals: losses {mine} and {theirs}"
        )


def _global_losses(contender: str, ranks: Sequence[dict[str, list[float]]]) -> list[float]:
    """A peer tells the loss of a rank's own samples, echelon that of all: the mean over ranks is the same."""
    steps = zip(*(losses[contender][:_WARMUP] for losses in ranks), strict=True)
    return [sum(losses) / len(losses) for losses in steps]
