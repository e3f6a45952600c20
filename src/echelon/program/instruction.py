"""Instructions and programs: one training step of every rank of a pipeline, as plain data.

    F3      forward of microbatch 3                      REDUCE   wait until the stage's gradients are summed
    B3      backward of microbatch 3                     TIE      sum the gradients of weights that several
    I3 W3   its two parts: for inputs, for weights                stages hold (tied embeddings)
    SA3>1   send the activation to rank 1                NORM     sum the loss and the squared norm of all
    RA3<0   receive the activation from rank 0                    gradients over all ranks
    SG3>0   send the gradient of the received input      UPDATE   the optimizer's step
    RG3<1   receive the gradient of the sent output      PUBLISH  bring new weights and buffers to the
    GATHER  gather the stage's weights (ZeRO 3)                   replicas that use them
    FREE    free the gathered weights                    STASH2   keep the current weights as version 2
    S3      store what F3 saved in host memory           POP2     free version 2
    T3      fetch it again, before B3; before I3, and
            once more before W3

A rank that holds several stages names the stage: `F3@5` is stage 5. TIE, NORM, UPDATE and PUBLISH concern the
whole rank; their stage is the rank's first. A computation that does not use the newest weights names their
version: `F3v1`, `B3@5v1`. Ranks are those of one pipeline, numbered within it.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import dropwhile
from math import lcm
from typing import NamedTuple


class Op(StrEnum):
    """The operation of an instruction; the value is how it is written."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"
    STORE = "S"
    FETCH = "T"
    GATHER = "GATHER"
    FREE = "FREE"
    REDUCE = "REDUCE"
    TIE = "TIE"
    NORM = "NORM"
    STASH = "STASH"
    POP = "POP"
    UPDATE = "UPDATE"
    PUBLISH = "PUBLISH"

    __hash__ = str.__hash__  # Enum's hash is written in Python, and would dominate every lookup


COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
SENDS = frozenset({Op.SEND_ACTIVATION, Op.SEND_GRADIENT})
RECEIVES = frozenset({Op.RECV_ACTIVATION, Op.RECV_GRADIENT})
COPIES = frozenset({Op.STORE, Op.FETCH})  # of activations, beside the computation
# What a rank does when it has run all its forwards, where these come first.
AFTER_FORWARDS = frozenset(
    {Op.RECV_GRADIENT, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.REDUCE, Op.TIE, Op.NORM}
)
RANK_LEVEL = frozenset({Op.TIE, Op.NORM, Op.UPDATE, Op.PUBLISH})  # concern all stages of the rank at once


class Instruction(NamedTuple):
    """One instruction of one rank.

    `stage` is the stage that computes, sends its output or receives its input. `peer` is the other rank of a
    send or receive. `version` numbers weights by the updates before them.
    """

    op: Op
    stage: int = 0
    microbatch: int | None = None
    peer: int | None = None
    version: int | None = None


@dataclass(frozen=True)
class Program:
    """The instructions of every rank of a pipeline in one step.

    `placement` lists the ranks that hold each stage: one, or several replicas that take microbatches in turn
    (replica k % replicas works on microbatch k).
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
        """True if backward passes are in two parts: for inputs, and later for weights."""
        return any(instruction.op is Op.BACKWARD_INPUT for rank in self.ranks for instruction in rank)

    @cached_property
    def versioned(self) -> bool:
        """True if any instruction names a version of the weights: stages then update at different times."""
        return any(instruction.version is not None for rank in self.ranks for instruction in rank)

    @cached_property
    def forwards_first(self) -> bool:
        """True if every rank runs and passes on all its forwards before its first backward."""
        forwards = (Op.FORWARD, Op.SEND_ACTIVATION, Op.RECV_ACTIVATION)
        for work in self.ranks:
            behind = dropwhile(lambda instruction: instruction.op not in AFTER_FORWARDS, work)
            if any(instruction.op in forwards for instruction in behind):
                return False
        return True

    def holder(self, stage: int, microbatch: int) -> int:
        """The rank that works on `microbatch` at `stage`."""
        replicas = self.placement[stage]
        return replicas[microbatch % len(replicas)]

    @cached_property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """(sender, receiver), for every two ranks between which messages go: activations and gradients."""
        forward = {
            (self.holder(stage, microbatch), self.holder(stage + 1, microbatch))
            for stage in range(self.stages - 1)
            for microbatch in range(self.round)
        }
        return frozenset(way for a, b in forward if a != b for way in ((a, b), (b, a)))

    @cached_property
    def round(self) -> int:
        """The number of microbatches after which the order of all stages' replicas repeats."""
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
