"""Lowering: passes that add to a program what its order of computation leaves unsaid. Each returns a new one.

add_transfers     sends right after what they send; receives before their use, in the order of the sends
add_reductions    REDUCE after a stage's last backward, and one UPDATE at the end
add_gathers       GATHER before a stage is used (before what it waits for), FREE after
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from echelon.program.instruction import COMPUTE, Instruction, Op, Program

_LAST_BACKWARDS = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
_SENDS_GRADIENT = (Op.BACKWARD, Op.BACKWARD_INPUT)

Channel = tuple[int, int]  # from rank, to rank


def add_transfers(program: Program) -> Program:
    """Add sends and receives between the ranks of neighbouring stages.

    What one rank sends another arrives in the order of the sends. So before a receive come those of all that
    was sent earlier on the same way, even if it is used later.
    """
    waiting: dict[Channel, deque[Instruction]] = {}
    for rank, instructions in enumerate(program.ranks):
        for send in (send for its in instructions for send in _sends(program, rank, its)):
            assert send.peer is not None
            waiting.setdefault((rank, send.peer), deque()).append(_receive(send, rank))
    ranks = tuple(
        tuple(_with_transfers(program, rank, its, waiting)) for rank, its in enumerate(program.ranks)
    )
    return replace(program, ranks=ranks)


def _with_transfers(
    program: Program,
    rank: int,
    instructions: Sequence[Instruction],
    waiting: dict[Channel, deque[Instruction]],
) -> Iterator[Instruction]:
    received: set[Instruction] = set()
    for its in instructions:
        need = _need(program, rank, its)
        if need is not None and need not in received:
            assert need.peer is not None
            queue = waiting.get((need.peer, rank), deque())
            while queue and need not in received:
                received.add(queue[0])
                yield queue.popleft()
            if need not in received:  # nobody sends it: leave the receive, for the check to find
                yield need
        yield its
        yield from _sends(program, rank, its)


def _sends(program: Program, rank: int, its: Instruction) -> Iterator[Instruction]:
    """What a rank sends after an instruction."""
    if its.op is Op.FORWARD and its.stage + 1 < program.stages:
        yield from _send(program, rank, its, Op.SEND_ACTIVATION, its.stage + 1)
    if its.op in _SENDS_GRADIENT and its.stage > 0:
        yield from _send(program, rank, its, Op.SEND_GRADIENT, its.stage - 1)


def _send(program: Program, rank: int, its: Instruction, op: Op, to: int) -> Iterator[Instruction]:
    assert its.microbatch is not None
    peer = program.holder(to, its.microbatch)
    if peer != rank:
        yield Instruction(op, its.stage, its.microbatch, peer)


def _receive(send: Instruction, rank: int) -> Instruction:
    """The receive that a send of `rank` is for."""
    if send.op is Op.SEND_ACTIVATION:
        return Instruction(Op.RECV_ACTIVATION, send.stage + 1, send.microbatch, rank)
    return Instruction(Op.RECV_GRADIENT, send.stage - 1, send.microbatch, rank)


def _need(program: Program, rank: int, its: Instruction) -> Instruction | None:
    """The receive that must stand before an instruction."""
    if its.op is Op.FORWARD and its.stage > 0:
        op, other = Op.RECV_ACTIVATION, its.stage - 1
    elif its.op in _SENDS_GRADIENT and its.stage + 1 < program.stages:
        op, other = Op.RECV_GRADIENT, its.stage + 1
    else:
        return None
    assert its.microbatch is not None
    peer = program.holder(other, its.microbatch)
    return None if peer == rank else Instruction(op, its.stage, its.microbatch, peer)


def add_reductions(program: Program) -> Program:
    """Add REDUCE after the last backward of each stage, and UPDATE at the end of each rank."""

    def lowered(rank: int, instructions: Sequence[Instruction]) -> Iterator[Instruction]:
        last = {its.stage: place for place, its in enumerate(instructions) if its.op in _LAST_BACKWARDS}
        for place, its in enumerate(instructions):
            yield its
            if last.get(its.stage) == place:
                yield Instruction(Op.REDUCE, its.stage)
        for stage in program.stages_of(rank):
            if stage not in last:  # fewer microbatches than replicas: this one has none, and takes part
                yield Instruction(Op.REDUCE, stage)
        yield Instruction(Op.UPDATE)

    return _each(program, lowered)


def add_gathers(program: Program) -> Program:
    """Add GATHER and FREE around every computation: gathering begins before the wait for an input."""

    def lowered(_: int, instructions: Sequence[Instruction]) -> Iterator[Instruction]:
        waiting: list[Instruction] = []
        for its in instructions:
            if its.op in (Op.RECV_ACTIVATION, Op.RECV_GRADIENT):
                waiting.append(its)
            elif its.op in COMPUTE:
                yield Instruction(Op.GATHER, its.stage)
                yield from waiting
                waiting = []
                yield its
                yield Instruction(Op.FREE, its.stage)
            else:
                yield from waiting
                waiting = []
                yield its
        yield from waiting

    return _each(program, lowered)


def _each(
    program: Program, lowered: Callable[[int, Sequence[Instruction]], Iterator[Instruction]]
) -> Program:
    return replace(program, ranks=tuple(tuple(lowered(rank, its)) for rank, its in enumerate(program.ranks)))
