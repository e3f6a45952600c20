"""Cost models: the time of a stage on r replicas per microbatch, of a transfer, and the memory of a rank.

A pipeline is as slow as its slowest stage or transfer. Workers come in levels, innermost first: (4, 2)
workers and bandwidths (1e10, 1.25e9) are two machines of 4 workers, with 10 GB/s inside a machine and 1.25
GB/s between machines. At a higher level, `compute` is the answer of the level below. Every function of a
model takes numbers or arrays of numbers.

    c  compute, forward and backward      w  parameter bytes        r  replicas of the stage
    a  bytes of activations               B  bytes per second       n  ranks inside one worker of the level

| model     | stage                         | transfer                 | memory per rank            |
|-----------|-------------------------------|--------------------------|----------------------------|
| echelon   | max(c / r, 2(r−1)w / (r·B·M)) | 2a / (B·r), both sides   | 4w + in flight · stash     |
| pipedream | (c + 4(r−1)w / (B·r·n)) / r   | 2a / (B·r), the receiver | ceil(behind / r) · (a + w) |
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from echelon.quantities import read_rate


class Level(NamedTuple):
    """One level: workers that communicate at `bandwidth` bytes per second, each made of `inside` ranks."""

    workers: int
    bandwidth: float
    inside: int
    ranks: int  # of the whole cluster


def make_levels(workers: tuple[int, ...], bandwidths: tuple[float, ...]) -> tuple[Level, ...]:
    """Levels from numbers of workers and bandwidths, innermost first."""
    levels: list[Level] = []
    inside, ranks = 1, math.prod(workers)
    for count, bandwidth in zip(workers, bandwidths, strict=True):
        levels.append(Level(count, bandwidth, inside, ranks))
        inside *= count
    return tuple(levels)


def read_workers(text: str) -> tuple[int, ...]:
    """One number per level: read_workers('4x2') == (4, 2). Other text is a ValueError."""
    parts = text.lower().split("x")
    if not all(part.isascii() and part.isdecimal() and len(part) <= 6 and int(part) >= 1 for part in parts):
        raise ValueError(f"'{text}' must be integers from 1 to 999999, innermost first, like 8 or 4x2")
    return tuple(map(int, parts))


def read_bandwidths(text: str) -> tuple[float, ...]:
    """One rate per level: read_bandwidths('10GB/s,1.25e9') == (1e10, 1.25e9). Other text is a ValueError."""
    return tuple(read_rate(part) for part in text.split(","))


def cluster_errors(
    workers: tuple[int, ...], bandwidths: tuple[float, ...], memory: float | None
) -> list[str]:
    errors = [
        f"workers {count}: must be an integer, at least 1"
        for count in workers
        if not isinstance(count, int) or count < 1
    ]
    errors += [
        f"bandwidth {rate}: must be bytes per second, more than 0"
        for rate in bandwidths
        if not 0 < rate < math.inf
    ]
    if len(workers) != len(bandwidths) or not workers:
        errors.append(
            f"{len(workers)} levels of workers and {len(bandwidths)} bandwidths: give one bandwidth per "
            "level, innermost first"
        )
    if memory is not None and not memory > 0:
        errors.append(f"memory {memory}: must be bytes, more than 0")
    return errors


Many = Any  # a number, or an array of numbers


class Bytes(NamedTuple):
    """Bytes of a stage: parameters, outputs of all layers, stash of one microbatch, received activations."""

    parameters: Many
    outputs: Many
    stash: Many
    received: Many


class StagePosition(NamedTuple):
    """The replicas of a stage and the workers behind it (on later stages), on one level and in one unit.

    `outside`: ranks behind it outside the unit, per copy of the unit.
    """

    replicas: int
    behind: int
    outside: float

    def ranks_behind(self, level: Level) -> float:
        """Return the number of ranks that work on later stages, per worker of this stage."""
        return (self.outside + self.behind * level.inside) / self.replicas


@dataclass(frozen=True)
class CostModel(ABC):
    """The base of both models. `free_activations`: transfers of activations take no time."""

    free_activations: bool = False

    name: ClassVar[str]
    sender_pays: ClassVar[bool]
    sees_outside: ClassVar[bool]  # whether memory depends on what happens outside a machine

    @abstractmethod
    def exchange(self, parameters: Many, replicas: int, level: Level) -> Many:
        """Seconds per microbatch to exchange the gradients of a stage."""

    @abstractmethod
    def join(self, compute: Many, exchange: Many) -> Many:
        """Seconds of both: one after the other, or at the same time."""

    @abstractmethod
    def memory(self, stage: Bytes, position: StagePosition, level: Level) -> Many:
        """Bytes that a worker of this stage needs."""

    def stage(self, compute: Many, parameters: Many, replicas: int, level: Level) -> Many:
        return self.join(compute / replicas, self.exchange(parameters, replicas, level))

    def transfer(self, size: Many, replicas: int, level: Level) -> Many:
        """Activations forward and their gradients back; each replica takes every r-th microbatch."""
        return 0.0 * size if self.free_activations else 2 * size / (level.bandwidth * replicas)


@dataclass(frozen=True)
class Echelon(CostModel):
    """Gradients move in a ring, once per update, while the stage computes.

    An update takes M microbatches (`microbatches`; by default one per rank) in every split, so all splits
    train alike. `copies` are weights, gradients and two moments of the optimizer. In 1F1B a rank keeps one
    microbatch for itself and, shared with the other replicas of its stage, one for each rank behind.
    """

    microbatches: int | None = None
    copies: float = 4.0

    name: ClassVar[str] = "echelon"
    sender_pays: ClassVar[bool] = True
    sees_outside: ClassVar[bool] = True

    def exchange(self, parameters: Many, replicas: int, level: Level) -> Many:
        ring = 2 * (replicas - 1) / replicas * parameters / level.bandwidth
        return ring / (self.microbatches or level.ranks)

    def join(self, compute: Many, exchange: Many) -> Many:
        return np.maximum(compute, exchange)

    def memory(self, stage: Bytes, position: StagePosition, level: Level) -> Many:
        if level.inside > 1:  # the memory of a machine is that of its ranks
            return 0.0 * stage.parameters
        in_flight = 1 + np.ceil(position.ranks_behind(level) - 1e-9)
        return self.copies * stage.parameters + in_flight * (stage.stash + stage.received)


@dataclass(frozen=True)
class PipeDream(CostModel):
    """The model of PipeDream's optimizer: gradients move after the computation, after each microbatch.

    Between machines, the ranks of a machine share the exchange; PipeDream's own program does so in one of two
    cases. Memory is checked on each level separately.
    """

    name: ClassVar[str] = "pipedream"
    sender_pays: ClassVar[bool] = False
    sees_outside: ClassVar[bool] = False

    def exchange(self, parameters: Many, replicas: int, level: Level) -> Many:
        return 4 * (replicas - 1) * parameters / (level.bandwidth * replicas * level.inside) / replicas

    def join(self, compute: Many, exchange: Many) -> Many:
        return compute + exchange

    def memory(self, stage: Bytes, position: StagePosition, level: Level) -> Many:  # noqa: ARG002
        return np.ceil(position.behind / position.replicas) * (stage.outputs + stage.parameters)


MODELS: dict[str, type[CostModel]] = {model.name: model for model in (Echelon, PipeDream)}
