"""Lowering: passes that add to a program what its order of computation leaves open. Each returns a new one.

add_transfers     sends right after what they send; receives before their use, in the order of the sends
add_update        REDUCE of each stage, TIE, NORM, UPDATE and PUBLISH behind all else
fill_update       those of TIE, NORM and PUBLISH that a program with UPDATEs of its own leaves out
add_gathers       GATHER before a stage is used (before what it waits for), FREE after
without_update    NORM, UPDATE and PUBLISH taken away: passes alone, and the sums of their gradients
split_update      passes with REDUCE, and apart from them TIE, NORM, UPDATE and PUBLISH
add_copies        S after a forward and its send, T before each part of a backward (before what it waits for)
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from echelon.program.instruction import COMPUTE, COPIES, RECEIVES, Instruction, Op, Program
from echelon.program.readiness import BACKWARDS, GRADIENT, Channel, counterpart, input_need

Transfer = Instruction | None  # that belongs to a computation


def add_transfers(program: Program) -> Program:
    """Add sends and receives between the ranks of neighbouring stages.

    Messages from one rank to another arrive in the order of the sends. So a receive comes after those of all
    earlier messages of its channel, even if they are used later.
    """
    sends = [_transfers(program, rank, _send) for rank in range(len(program.ranks))]
    messages: dict[Channel, deque[Instruction]] = {}
    for rank, sends_of_rank in enumerate(sends):
        for send in sends_of_rank:
            if send is not None:
                assert send.peer is not None
                messages.setdefault((rank, send.peer), deque()).append(counterpart(rank, send))

    def lowered(rank: int, instructions: Sequence[Instruction]) -> Iterator[Instruction]:
        early: set[Instruction] = set()
        receives = _transfers(program, rank, _receive)
        for instruction, receive, send in zip(instructions, receives, sends[rank], strict=True):
            if receive is not None:
                assert receive.peer is not None
                yield from _receives(receive, messages.get((receive.peer, rank), deque()), early)
            yield instruction
            if send is not None:
                yield send

    return _each(program, lowered)


def _transfers(
    program: Program, rank: int, transfer_of: Callable[[Program, int, Instruction], Transfer]
) -> list[Transfer]:
    """The transfer that belongs to each instruction of a rank: the same in every round of microbatches."""
    known: dict[tuple[Op, int, int], Transfer] = {}
    transfers: list[Transfer] = []
    period = program.round
    for instruction in program.ranks[rank]:
        op, stage, k, _, _ = instruction
        transfer = None
        if k is not None:
            kind = (op, stage, k % period)
            if kind not in known:
                known[kind] = transfer_of(program, rank, instruction)
            similar = known[kind]
            transfer = None if similar is None else Instruction(similar.op, stage, k, similar.peer)
        transfers.append(transfer)
    return transfers


def _receives(
    receive: Instruction, messages: deque[Instruction], early: set[Instruction]
) -> Iterator[Instruction]:
    """The receives up to `receive`; those of messages that are used later are remembered as `early`."""
    if early and receive in early:
        early.remove(receive)
    elif messages and (messages[0] == receive or receive in messages):
        while messages[0] != receive:
            early.add(messages[0])
            yield messages.popleft()
        yield messages.popleft()
    else:  # sent in an earlier step of a pipeline that never drains; or by no rank, which the check reports
        yield receive


def _send(program: Program, rank: int, instruction: Instruction) -> Transfer:
    """Return the send that follows an instruction, if any."""
    if instruction.op is Op.FORWARD:
        op, neighbour = Op.SEND_ACTIVATION, instruction.stage + 1
    elif instruction.op in GRADIENT:
        op, neighbour = Op.SEND_GRADIENT, instruction.stage - 1
    else:
        return None
    if not 0 <= neighbour < len(program.placement):
        return None
    assert instruction.microbatch is not None
    peer = program.holder(neighbour, instruction.microbatch)
    return None if peer == rank else Instruction(op, instruction.stage, instruction.microbatch, peer)


def _receive(program: Program, rank: int, instruction: Instruction) -> Transfer:
    """The receive that must stand before an instruction."""
    if instruction.op not in COMPUTE:
        return None
    need = input_need(program, rank, instruction)
    if need is None or need.stage != instruction.stage:  # nothing to wait for, or this rank computes it
        return None
    (op,) = need.ops
    neighbour = instruction.stage - 1 if op is Op.RECV_ACTIVATION else instruction.stage + 1
    assert instruction.microbatch is not None
    peer = program.holder(neighbour, instruction.microbatch)
    return Instruction(op, instruction.stage, instruction.microbatch, peer)


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


def without_update(program: Program) -> Program:
    """Leave out what decides on new weights, makes them and brings them to other ranks."""
    left_out = (Op.NORM, Op.UPDATE, Op.PUBLISH)
    return _each(program, lambda _, instructions: (i for i in instructions if i.op not in left_out))


def split_update(program: Program, *, sums: bool = False) -> tuple[Program, Program]:
    """Split a flushed step in two: its passes, and what follows when gradients are there. `sums`: the second
    one begins with REDUCE too, since passes that added up gradients alone came before it."""
    end = (Op.TIE, Op.NORM, Op.UPDATE, Op.PUBLISH)
    with_sums = (Op.REDUCE, *end) if sums else end
    passes = _each(program, lambda _, instructions: (i for i in instructions if i.op not in end))
    update = _each(program, lambda _, instructions: (i for i in instructions if i.op in with_sums))
    return passes, replace(update, microbatches=0)


def fill_update(program: Program, absent: Collection[Op]) -> Program:
    """Add what is `absent` of TIE, NORM and PUBLISH around each UPDATE: TIE NORM [STASH] UPDATE PUBLISH."""

    def before(instruction: Instruction) -> Iterator[Instruction]:
        if Op.TIE in absent and instruction.op is (Op.UPDATE if Op.NORM in absent else Op.NORM):
            yield Instruction(Op.TIE, instruction.stage)
        if Op.NORM in absent and instruction.op is Op.UPDATE:
            yield Instruction(Op.NORM, instruction.stage)

    def after(instruction: Instruction) -> Iterator[Instruction]:
        if Op.PUBLISH in absent and instruction.op is Op.UPDATE:
            yield Instruction(Op.PUBLISH, instruction.stage)

    return _around(program, before, after, {Op.STASH})


def add_gathers(program: Program) -> Program:
    """Add GATHER and FREE around every computation. A gather begins before the wait for an input."""

    def each(op: Op) -> Callable[[Instruction], list[Instruction]]:
        return lambda instruction: [Instruction(op, instruction.stage)] if instruction.op in COMPUTE else []

    return _around(program, each(Op.GATHER), each(Op.FREE), RECEIVES)


def add_copies(program: Program) -> Program:
    """Add S and T of every microbatch: what its forward saves is in host memory until its backward, and
    between the two parts of one. A program that has some stays as it is."""
    if any(instruction.op in COPIES for work in program.ranks for instruction in work):
        return program

    def fetch(instruction: Instruction) -> list[Instruction]:
        is_needed = instruction.op in BACKWARDS
        return [Instruction(Op.FETCH, instruction.stage, instruction.microbatch)] if is_needed else []

    def with_stores(_: int, instructions: Sequence[Instruction]) -> Iterator[Instruction]:
        store: Instruction | None = None
        for instruction in (*instructions, None):
            # The output is sent first: the next rank waits for it, and nothing waits for the copy.
            if store is not None and (instruction is None or instruction.op is not Op.SEND_ACTIVATION):
                yield store
                store = None
            if instruction is not None:
                yield instruction
                if instruction.op is Op.FORWARD:
                    store = Instruction(Op.STORE, instruction.stage, instruction.microbatch)

    return _each(_around(program, fetch, lambda _: (), RECEIVES), with_stores)


def _around(
    program: Program,
    before: Callable[[Instruction], Iterable[Instruction]],
    after: Callable[[Instruction], Iterable[Instruction]],
    held: Collection[Op],
) -> Program:
    """Add what comes before and after each instruction; before also those that are `held`, which wait for
    the instruction behind them."""

    def lowered(_: int, instructions: Sequence[Instruction]) -> Iterator[Instruction]:
        waiting: list[Instruction] = []
        for instruction in instructions:
            if instruction.op in held:
                waiting.append(instruction)
                continue
            yield from (*before(instruction), *waiting, instruction, *after(instruction))
            waiting = []
        yield from waiting

    return _each(program, lowered)


def _each(
    program: Program, lowered: Callable[[int, Sequence[Instruction]], Iterator[Instruction]]
) -> Program:
    ranks = tuple(tuple(lowered(rank, instructions)) for rank, instructions in enumerate(program.ranks))
    return replace(program, ranks=ranks)
