"""When an instruction may run: the one rule that lowering, check, simulation and execution share.

A rank runs its instructions in their order. Some wait for other ranks (`walk`):

    a receive    for its send: the n-th receive from a rank takes what that rank's n-th send put on the way
    REDUCE       until every replica of the stage has come to its own n-th REDUCE
    TIE, NORM    until every rank has come to its own n-th TIE or NORM; in a program with weight versions for
                 no rank, since stages then update at different times

Sends never wait. All other instructions need only what the same rank did before them (`needs`); where that is
missing, waiting does not help, and the check reports it.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from echelon.program.instruction import SENDS, Instruction, Op, Program

GRADIENT = (Op.BACKWARD, Op.BACKWARD_INPUT)  # either makes the gradient that the stage before waits for
BACKWARDS = (*GRADIENT, Op.BACKWARD_WEIGHT)  # each takes what the forward saved

Position = tuple[int, int]  # rank, index in its list
Event = tuple[int, int, tuple[Position, ...]]  # rank and index of what runs, and what it waited for
Channel = tuple[int, int]  # from rank, to rank


class Need(NamedTuple):
    """Work that a rank must have done before: one of `ops` at `stage`, for the same microbatch."""

    ops: tuple[Op, ...]
    stage: int


def input_need(program: Program, rank: int, instruction: Instruction) -> Need | None:
    """Return the source of a computation's input: a receive, or the neighbouring stage on the same rank."""
    op, stage, microbatch, _, _ = instruction
    assert microbatch is not None
    if op is Op.FORWARD and stage > 0:
        is_local = program.holder(stage - 1, microbatch) == rank
        return Need((Op.FORWARD,), stage - 1) if is_local else Need((Op.RECV_ACTIVATION,), stage)
    if op in GRADIENT and stage + 1 < len(program.placement):
        is_local = program.holder(stage + 1, microbatch) == rank
        return Need(GRADIENT, stage + 1) if is_local else Need((Op.RECV_GRADIENT,), stage)
    return None


_SAME_STAGE_NEEDS: dict[Op, tuple[Op, ...]] = {
    Op.BACKWARD: (Op.FORWARD,),
    Op.BACKWARD_INPUT: (Op.FORWARD,),
    Op.BACKWARD_WEIGHT: (Op.BACKWARD_INPUT,),
    Op.SEND_ACTIVATION: (Op.FORWARD,),
    Op.SEND_GRADIENT: GRADIENT,
    Op.STORE: (Op.FORWARD,),
    Op.FETCH: (Op.STORE,),
}


def needs(program: Program, rank: int, instruction: Instruction) -> list[Need]:
    """Return what must stand before an instruction in the list of its own rank."""
    if instruction.microbatch is None:
        return []
    ops = _SAME_STAGE_NEEDS.get(instruction.op)
    of_input = input_need(program, rank, instruction)
    return [*([Need(ops, instruction.stage)] if ops else []), *([of_input] if of_input else [])]


def counterpart(rank: int, transfer: Instruction) -> Instruction:
    """The receive that a send of `rank` is for, or the send that a receive of `rank` takes."""
    op, step = _COUNTERPARTS[transfer.op]
    return Instruction(op, transfer.stage + step, transfer.microbatch, rank)


_COUNTERPARTS = {
    Op.SEND_ACTIVATION: (Op.RECV_ACTIVATION, 1),
    Op.RECV_ACTIVATION: (Op.SEND_ACTIVATION, -1),
    Op.SEND_GRADIENT: (Op.RECV_GRADIENT, -1),
    Op.RECV_GRADIENT: (Op.SEND_GRADIENT, 1),
}


def walk(program: Program) -> Iterator[Event]:
    """Every instruction that comes to run, after all that it waits for; ranks that get stuck stay behind."""
    reached = [0] * len(program.ranks)
    sent: dict[Channel, deque[Position]] = {}
    asleep: dict[Channel, int] = {}
    rendezvous = _Rendezvous(program)
    ready = deque(range(len(program.ranks)))
    while ready:
        rank = ready.popleft()
        instructions = program.ranks[rank]
        for index in range(reached[rank], len(instructions)):
            op, stage, microbatch, peer, _ = instructions[index]
            causes: tuple[Position, ...] | None = ()
            if peer is not None:
                if op in SENDS:
                    channel = (rank, peer)
                    sent.setdefault(channel, deque()).append((rank, index))
                    if channel in asleep:
                        ready.append(asleep.pop(channel))
                else:
                    channel = (peer, rank)
                    causes = (sent[channel].popleft(),) if sent.get(channel) else None
                    if causes is None:
                        asleep[channel] = rank
            elif microbatch is None and op in rendezvous.ops:
                causes, woken = rendezvous.arrive(rank, index, op, stage)
                ready.extend(woken)
            if causes is None:
                reached[rank] = index
                break
            yield rank, index, causes


def partners(program: Program, op: Op, stage: int) -> frozenset[int]:
    """The ranks that meet at a REDUCE of `stage`, or at a TIE or NORM."""
    if op is Op.REDUCE:
        return frozenset(program.placement[stage])
    return frozenset(rank for ranks in program.placement for rank in ranks)


class _Rendezvous:
    """Instructions at which ranks meet: who has come to which."""

    def __init__(self, program: Program) -> None:
        self.ops = frozenset({Op.REDUCE} if program.versioned else {Op.REDUCE, Op.TIE, Op.NORM})
        self._program = program
        self._sizes: dict[tuple[Op, int], int] = {}
        self._passed: dict[tuple[int, Op, int], int] = {}  # how many of a kind a rank has behind it
        self._arrived: dict[tuple[Op, int, int], dict[int, int]] = {}  # by kind and number: each rank's index
        self._causes: dict[tuple[Op, int, int], tuple[Position, ...]] = {}  # of those that are complete

    def arrive(
        self, rank: int, index: int, op: Op, stage: int
    ) -> tuple[tuple[Position, ...] | None, list[int]]:
        """Return what each rank did last before it came (None while one is missing), and the ranks to wake.
        Every rank of a rendezvous is given the same tuple."""
        kind = (op, stage if op is Op.REDUCE else 0)
        number = self._passed.get((rank, *kind), 0)
        arrived = self._arrived.setdefault((*kind, number), {})
        is_new = rank not in arrived
        arrived[rank] = index
        if len(arrived) < self._size(*kind):
            return None, []
        self._passed[rank, *kind] = number + 1
        if (*kind, number) not in self._causes:
            self._causes[*kind, number] = tuple((other, at - 1) for other, at in arrived.items() if at)
        woken = [other for other in arrived if other != rank] if is_new else []
        return self._causes[*kind, number], woken

    def _size(self, op: Op, stage: int) -> int:
        if (op, stage) not in self._sizes:
            self._sizes[op, stage] = len(partners(self._program, op, stage))
        return self._sizes[op, stage]
