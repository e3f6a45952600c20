"""Lowering: passes that add to a program what its order of computation leaves unsaid. Each returns a new one.

add_transfers     sends right after what they send; receives before their use, in the order of the sends
add_update        REDUCE of each stage, TIE, NORM, UPDATE and PUBLISH behind all else
fill_update       those of TIE, NORM and PUBLISH that a program with UPDATEs of its own leaves out
add_gathers       GATHER before a stage is used (before what it waits for), FREE after
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from echelon.program.instruction import COMPUTE, RECEIVES, Instruction, Op, Program
from echelon.program.readiness import GRADIENT, Way, counterpart, source


def add_transfers(program: Program) -> Program:
    """Add sends and receives between the ranks of neighbouring stages.

    What one rank sends another arrives in the order of the sends. So before a receive come those of all that
    was sent earlier on the same way, even if it is used later.
    """
    sends = [_of_each(program, rank, _send) for rank in range(len(program.ranks))]
    coming: dict[Way, deque[Instruction]] = {}
    for rank, its_sends in enumerate(sends):
        for send in its_sends:
            if send is not None:
                assert send.peer is not None
                coming.setdefault((rank, send.peer), deque()).append(counterpart(rank, send))

    def lowered(rank: int, instructions: Sequence[Instruction]) -> Iterator[Instruction]:
        early: set[Instruction] = set()
        needs = _of_each(program, rank, _receive)
        for its, need, send in zip(instructions, needs, sends[rank], strict=True):
            if need is not None:
                assert need.peer is not None
                yield from _receives(need, coming.get((need.peer, rank), deque()), early)
            yield its
            if send is not None:
                yield send

    return _each(program, lowered)


def _of_each(
    program: Program, rank: int, transfer: Callable[[Program, int, Instruction], Instruction | None]
) -> list[Instruction | None]:
    """The transfer that belongs to each instruction of a rank: the same in every round of microbatches."""
    known: dict[tuple[Op, int, int], Instruction | None] = {}
    found: list[Instruction | None] = []
    turn = program.round
    for its in program.ranks[rank]:
        op, stage, k, _, _ = its
        its_own = None
        if k is not None:
            kind = (op, stage, k % turn)
            if kind not in known:
                known[kind] = transfer(program, rank, its)
            like = known[kind]
            its_own = None if like is None else Instruction(like.op, stage, k, like.peer)
        found.append(its_own)
    return found


def _receives(need: Instruction, queue: deque[Instruction], early: set[Instruction]) -> Iterator[Instruction]:
    """The receives up to `need`; those of things that are used later are remembered as `early`."""
    if early and need in early:
        early.remove(need)
    elif queue and (queue[0] == need or need in queue):
        while queue[0] != need:
            early.add(queue[0])
            yield queue.popleft()
        yield queue.popleft()
    else:  # sent in an earlier step of a pipeline that never drains; or by nobody, for the check to find
        yield need


def _send(program: Program, rank: int, its: Instruction) -> Instruction | None:
    """What a rank sends after an instruction."""
    if its.op is Op.FORWARD:
        op, to = Op.SEND_ACTIVATION, its.stage + 1
    elif its.op in GRADIENT:
        op, to = Op.SEND_GRADIENT, its.stage - 1
    else:
        return None
    if not 0 <= to < len(program.placement):
        return None
    assert its.microbatch is not None
    peer = program.holder(to, its.microbatch)
    return None if peer == rank else Instruction(op, its.stage, its.microbatch, peer)


def _receive(program: Program, rank: int, its: Instruction) -> Instruction | None:
    """The receive that must stand before an instruction."""
    if its.op not in COMPUTE:
        return None
    need = source(program, rank, its)
    if need is None or need.stage != its.stage:  # nothing to wait for, or it is made on this rank
        return None
    (op,) = need.ops
    other = its.stage - 1 if op is Op.RECV_ACTIVATION else its.stage + 1
    assert its.microbatch is not None
    return Instruction(op, its.stage, its.microbatch, program.holder(other, its.microbatch))


def add_update(program: Program, *, ties: bool = False) -> Program:
    """Add the end of a flushed step to every rank: REDUCE of each stage, [TIE], NORM, UPDATE, PUBLISH.

    The sums of gradients are on their way since the last backward. REDUCE waits for them, so an early one
    would delay the rank's other work. A replica without a microbatch takes part in the sums too.
    """
    ops = (*((Op.TIE,) if ties else ()), Op.NORM, Op.UPDATE, Op.PUBLISH)

    def lowered(rank: int, instructions: Sequence[Instruction]) -> Iterator[Instruction]:
        yield from instructions
        stages = program.stages_of(rank)
        yield from (Instruction(Op.REDUCE, stage) for stage in stages)
        yield from (Instruction(op, stages[0]) for op in ops if stages)

    return _each(program, lowered)


def fill_update(program: Program, absent: Collection[Op]) -> Program:
    """Add what is `absent` of TIE, NORM and PUBLISH around each UPDATE: TIE NORM [STASH] UPDATE PUBLISH."""

    def lowered(_: int, instructions: Sequence[Instruction]) -> Iterator[Instruction]:
        stashes: list[Instruction] = []  # an update's own, behind which no NORM may stand
        for instruction in instructions:
            op, stage = instruction.op, instruction.stage
            if op is Op.STASH:
                stashes.append(instruction)
                continue
            if Op.TIE in absent and op is (Op.UPDATE if Op.NORM in absent else Op.NORM):
                yield Instruction(Op.TIE, stage)
            if Op.NORM in absent and op is Op.UPDATE:
                yield Instruction(Op.NORM, stage)
            yield from stashes
            stashes = []
            yield instruction
            if Op.PUBLISH in absent and op is Op.UPDATE:
                yield Instruction(Op.PUBLISH, stage)
        yield from stashes

    return _each(program, lowered)


def add_gathers(program: Program) -> Program:
    """Add GATHER and FREE around every computation: gathering begins before the wait for an input."""

    def lowered(_: int, instructions: Sequence[Instruction]) -> Iterator[Instruction]:
        waiting: list[Instruction] = []
        for its in instructions:
            if its.op in RECEIVES:
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
