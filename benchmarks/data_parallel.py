"""The bench `data-parallel`: a training step of a GPT on two ranks at each level of ZeRO, beside its peers.

A case compares echelon, one peer that shards the same at that level, and the same compute without
communication. They take turns step by step in the same ranks. `replicas` says what each does. If the losses
of the first steps differ, the result says so, and whose losses are those of one device.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import footprint, replicas
from benchmarks.compare import Row, compare, slowest
from benchmarks.harness import alternate, measuring_ranks, timed
from benchmarks.loss_agreement import ECHELON, difference
from benchmarks.replicas import Peer
from echelon.launching import TRAINING_MODULES, RankFailed, preload
from echelon.models import ModelConfig
from echelon.train.rehearsal import make_batch

_RANKS = 2
_SAMPLES = 2  # per rank
_FULL = ModelConfig("gpt", layers=6, width=512, heads=8, vocab=256, sequence=128, tied=True)
_SMALL = ModelConfig("gpt", layers=1, width=32, heads=2, vocab=64, sequence=16, tied=True)

# The engine meters activations in its first three steps, which makes them slower.
_WARMUP = 4
_MEMORY_STEPS = 3

_COMPUTE_ONLY = "compute only"
_PRELOADED = ("benchmarks.data_parallel", "torch.distributed.fsdp", "torch.distributed.optim")


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
    rows, remarks = _measure_peers([peer for peer in replicas.peers() if peer.installed], config, rounds)
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
        "remarks": remarks,
    }
    return settings, rows


def _measure_peers(peers: Sequence[Peer], config: ModelConfig, rounds: int) -> tuple[list[Row], list[str]]:
    """The rows of all peers, and what a reader must know: who trains differently, and who cannot run here."""
    rows: list[Row] = []
    remarks: list[str] = []
    for peer in peers:
        try:
            rows += _rows(peer, config, rounds, remarks)
        except RankFailed as failure:
            if peer.package == "torch":  # then it is echelon, or the bench, that fails
                raise
            remarks.append(f"zero={peer.level}: {peer.name} cannot be measured here: {failure.reason}")
    return rows, remarks


def _rows(peer: Peer, config: ModelConfig, rounds: int, remarks: list[str]) -> list[Row]:
    with measuring_ranks(_RANKS) as ranks:
        measured = ranks.run(measure, peer, config, rounds)
    remark = difference(peer, [rank.losses for rank in measured], _WARMUP, partial(_one_device, config))
    if remark is not None:
        remarks.append(remark)
    rows = compare(f"zero={peer.level}", slowest([rank.seconds for rank in measured]), peer.name)
    return [dataclasses.replace(row, extras=_extras(row, peer, config)) for row in rows]


def _one_device(config: ModelConfig) -> list[float]:
    with measuring_ranks(1) as ranks:
        (losses,) = ranks.run(train_alone, config)
    return losses


def train_alone(config: ModelConfig) -> list[float]:
    """Runs in one rank: the first losses of one device that trains on the batches of all ranks together."""
    batches = [make_batch(config, _SAMPLES, seed=rank) for rank in range(_RANKS)]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    step = replicas.compute_only_step(config)
    return [step((inputs, targets)) for _ in range(_WARMUP)]


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
    losses: dict[str, list[float]] = {name: [] for name in (_COMPUTE_ONLY, peer.name, ECHELON)}
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
    if contender == ECHELON:
        engine = replicas.make_engine(config, peer.level)
        return Work(lambda: engine.step(batch).loss, engine.close)
    step = replicas.compute_only_step(config) if contender == _COMPUTE_ONLY else peer.make_step(config)
    return Work(partial(step, batch))


def _train(work: Callable[[], float], losses: list[float]) -> None:
    losses.append(work())
