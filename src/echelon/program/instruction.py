"""Instructions and programs: one training step of every rank of a pipeline, as plain data.

    F3      forward of microbatch 3                      RA3<0   receive its activation from rank 0
    B3      backward                                     SA3>1   send it on to rank 1
    I3 W3   backward for inputs, for weights             RG3<1   receive the gradient of what was sent
    STASH2  keep the weights of now as version 2         SG3>0   send the gradient of what was received
    POP2    let version 2 go                             GATHER  make the stage's weights whole (ZeRO 3)
    REDUCE  sum the stage's gradients over replicas      FREE    give the memory of whole weights back
    UPDATE  the optimizer's step

A rank that holds several stages says which: `F3@5` is stage 5. A forward or backward that uses other weights
than the newest says which version: `F3v1`, `B3@5v1`. Ranks are those of one pipeline, numbered within it.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import lcm
from typing import NamedTuple


class Op(StrEnum):
    """What an instruction does; the value is how it is written."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"
    GATHER = "GATHER"
    FREE = "FREE"
    REDUCE = "REDUCE"
    STASH = "STASH"
    POP = "POP"
    UPDATE = "UPDATE"

    __hash__ = str.__hash__  # that of Enum is Python, and the slowest part of looking an instruction up


COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
SENDS = frozenset({Op.SEND_ACTIVATION, Op.SEND_GRADIENT})
RECEIVES = frozenset({Op.RECV_ACTIVATION, Op.RECV_GRADIENT})


class Instruction(NamedTuple):
    """One instruction of one rank.

    `stage` is the stage that works, sends or receives: its own output goes out, its own input comes in.
    `peer` is the other rank of a send or receive. `version` numbers weights by the updates before them.
    """

    op: Op
    stage: int = 0
    microbatch: int | None = None
    peer: int | None = None
    version: int | None = None


@dataclass(frozen=True)
class Program:
    """What every rank of a pipeline does in one step.

    `placement` names for each stage the ranks that hold it: one, or its replicas, which take microbatches in
    turn (microbatch k is that of replica k % replicas).
    """

    name: str
    placement: tuple[tuple[int, ...], ...]
    microbatches: int
    ranks: tuple[tuple[Instruction, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def halves(self) -> bool:
        """Whether backward passes are in two parts: for inputs, and later for weights."""
        return any(its.op is Op.BACKWARD_INPUT for rank in self.ranks for its in rank)

    def holder(self, stage: int, microbatch: int) -> int:
        """The rank that works on `microbatch` at `stage`."""
        replicas = self.placement[stage]
        return replicas[microbatch % len(replicas)]

    @property
    def round(self) -> int:
        """After so many microbatches every stage's replicas begin anew: who does what is then the same."""
        return lcm(*(len(ranks) for ranks in self.placement))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, in the order of the model."""
        return self._held.get(rank, ())

    @cached_property
    def _held(self) -> dict[int, tuple[int, ...]]:
        held: dict[int, tuple[int, ...]] = {}
        for stage, ranks in enumerate(self.placement):
            for rank in dict.fromkeys(ranks):
                held[rank] = (*held.get(rank, ()), stage)
        return held
