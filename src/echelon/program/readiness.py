"""When an instruction may run: the one rule that lowering, check, simulation and execution share.

A rank runs its instructions in their order. Two kinds wait for other ranks (`walk`):

    a receive    for its send: the n-th receive from a rank takes what that rank's n-th send put on the way
    a REDUCE     until every replica of the stage has come to its own n-th REDUCE

Sends never wait. All else needs only what the same rank did before it (`needs`): where that is missing, no
patience helps, and the check says so.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from echelon.program.instruction import SENDS, Instruction, Op, Program

GRADIENT = (Op.BACKWARD, Op.BACKWARD_INPUT)  # either makes the gradient that the stage before waits for

Place = tuple[int, int]  # rank, position in its list
Moment = tuple[int, int, tuple[Place, ...]]  # rank and position of what runs, and what it waited for
Way = tuple[int, int]  # from rank, to rank


class Need(NamedTuple):
    """What a rank must have done before: one of `ops` at `stage`, for the same microbatch."""

    ops: tuple[Op, ...]
    stage: int


def source(program: Program, rank: int, its: Instruction) -> Need | None:
    """Where a computation's input comes from: a receive, or the neighbouring stage on the same rank."""
    stage, microbatch = its.stage, its.microbatch
    assert microbatch is not None
    if its.op is Op.FORWARD:
        if stage == 0:
            return None
        here = program.holder(stage - 1, microbatch) == rank
        return Need((Op.FORWARD,), stage - 1) if here else Need((Op.RECV_ACTIVATION,), stage)
    if its.op in GRADIENT and stage + 1 < len(program.placement):
        here = program.holder(stage + 1, microbatch) == rank
        return Need(GRADIENT, stage + 1) if here else Need((Op.RECV_GRADIENT,), stage)
    return None


_OWN_NEEDS: dict[Op, tuple[Op, ...]] = {
    Op.BACKWARD: (Op.FORWARD,),
    Op.BACKWARD_INPUT: (Op.FORWARD,),
    Op.BACKWARD_WEIGHT: (Op.BACKWARD_INPUT,),
    Op.SEND_ACTIVATION: (Op.FORWARD,),
    Op.SEND_GRADIENT: GRADIENT,
}


def needs(program: Program, rank: int, its: Instruction) -> list[Need]:
    """What must stand before an instruction in the list of its own rank."""
    if its.microbatch is None:
        return []
    own = _OWN_NEEDS.get(its.op)
    given = source(program, rank, its)
    return [*([Need(own, its.stage)] if own else []), *([given] if given else [])]


def counterpart(rank: int, its: Instruction) -> Instruction:
    """The receive that a send of `rank` is for, or the send that a receive of `rank` takes."""
    op, beyond = _COUNTERPARTS[its.op]
    return Instruction(op, its.stage + beyond, its.microbatch, rank)


_COUNTERPARTS = {
    Op.SEND_ACTIVATION: (Op.RECV_ACTIVATION, 1),
    Op.RECV_ACTIVATION: (Op.SEND_ACTIVATION, -1),
    Op.SEND_GRADIENT: (Op.RECV_GRADIENT, -1),
    Op.RECV_GRADIENT: (Op.SEND_GRADIENT, 1),
}


def walk(program: Program) -> Iterator[Moment]:
    """Every instruction that comes to run, after all that it waits for; ranks that get stuck stay behind."""
    places = [0] * len(program.ranks)
    sent: dict[Way, deque[Place]] = {}
    asleep: dict[Way, int] = {}
    reductions = _Reductions(program)
    ready = deque(range(len(program.ranks)))
    while ready:
        rank = ready.popleft()
        instructions = program.ranks[rank]
        for place in range(places[rank], len(instructions)):
            its = instructions[place]
            causes: tuple[Place, ...] | None = ()
            if its.peer is not None:
                if its.op in SENDS:
                    way = (rank, its.peer)
                    sent.setdefault(way, deque()).append((rank, place))
                    if way in asleep:
                        ready.append(asleep.pop(way))
                else:
                    way = (its.peer, rank)
                    causes = (sent[way].popleft(),) if sent.get(way) else None
                    if causes is None:
                        asleep[way] = rank
            elif its.op is Op.REDUCE:
                causes, woken = reductions.arrive(rank, place, its.stage)
                ready.extend(woken)
            if causes is None:
                places[rank] = place
                break
            yield rank, place, causes


class _Reductions:
    """The REDUCEs of stages with replicas: who has come to which."""

    def __init__(self, program: Program) -> None:
        self._replicas = [len(ranks) for ranks in program.placement]
        self._passed: dict[tuple[int, int], int] = {}  # by (rank, stage): how many this rank has behind it
        self._there: dict[tuple[int, int], dict[int, int]] = {}  # by (stage, number): each rank's place

    def arrive(self, rank: int, place: int, stage: int) -> tuple[tuple[Place, ...] | None, list[int]]:
        """What the others did last before they came (None while one is missing), and whom this wakes."""
        number = self._passed.get((rank, stage), 0)
        there = self._there.setdefault((stage, number), {})
        comes = rank not in there
        there[rank] = place
        if len(there) < self._replicas[stage]:
            return None, []
        self._passed[rank, stage] = number + 1
        others = [other for other in there if other != rank]
        return tuple((other, there[other] - 1) for other in others if there[other]), others if comes else []
