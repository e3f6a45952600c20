"""Rules between ranks: sends and receives are pairs, in one order; and nobody waits for ever."""

from collections import Counter
from collections.abc import Iterator, Sequence

from echelon.program.instruction import SENDS, Instruction, Op, Program
from echelon.program.readiness import Way, counterpart, partners, walk
from echelon.program.rules.error import ProgramError, name

_MOST_NAMED = 5  # ranks in one sentence

Listed = list[tuple[int, Instruction]]  # receives of one way, each with the place where it stands or is sent


def matched(program: Program) -> Iterator[ProgramError]:
    """On each way from rank to rank the receives are those of the sends, in their order."""
    sends: dict[Way, list[int]] = {}  # where they stand
    receives: dict[Way, list[int]] = {}
    for rank, instructions in enumerate(program.ranks):
        for place, its in enumerate(instructions):
            if its.peer is not None:  # `placed` has seen to it that only these have one
                listed, way = (sends, (rank, its.peer)) if its.op in SENDS else (receives, (its.peer, rank))
                listed.setdefault(way, []).append(place)
    for way in sorted(sends.keys() | receives.keys()):
        sender, receiver = way
        sent = [(at, counterpart(sender, program.ranks[sender][at])) for at in sends.get(way, [])]
        received = [(at, program.ranks[receiver][at]) for at in receives.get(way, [])]
        if [its for _, its in sent] != [its for _, its in received]:
            yield from _matched_on(program, way, sent, received)


def _matched_on(program: Program, way: Way, sent: Listed, received: Listed) -> Iterator[ProgramError]:
    sender, receiver = way
    spare = Counter(its for _, its in sent)
    spare.subtract(its for _, its in received)
    for place, its in sent:
        if spare[its] > 0:
            spare[its] -= 1
            called = name(program, receiver, its)
            yield ProgramError(
                sender, place, f"rank {receiver} never receives it: there is no {called} there"
            )
    for place, its in received:
        if spare[its] < 0:
            spare[its] += 1
            called = name(program, sender, counterpart(receiver, its))
            yield ProgramError(receiver, place, f"rank {sender} never sends it: there is no {called} there")
    if Counter(its for _, its in sent) == Counter(its for _, its in received):
        yield from _same_order(program, way, sent, received)


def _same_order(program: Program, way: Way, sent: Listed, received: Listed) -> Iterator[ProgramError]:
    """Only the first that differs: those behind it follow from it."""
    sender, receiver = way
    for number, ((_, wanted), (place, its)) in enumerate(zip(sent, received, strict=True), 1):
        if wanted != its:
            called = name(program, sender, counterpart(receiver, wanted))
            reason = f"takes the wrong thing: number {number} on the way from rank {sender} is {called}"
            yield ProgramError(receiver, place, f"{reason}; things arrive in the order of their sends")
            return


def never_stuck(program: Program) -> Iterator[ProgramError]:
    """All ranks come to the end, whatever anything costs."""
    reached = Counter(rank for rank, _, _ in walk(program))
    stuck = {rank: reached[rank] for rank, work in enumerate(program.ranks) if reached[rank] < len(work)}
    for rank, index in stuck.items():
        instruction = program.ranks[rank][index]
        if instruction.peer is not None:
            others = [instruction.peer]
            awaited = name(program, instruction.peer, counterpart(rank, instruction))
        else:
            others = sorted(partners(program, instruction.op, instruction.stage) - {rank})
            of = f"stage {instruction.stage}" if instruction.op is Op.REDUCE else "every rank"
            awaited = f"{instruction.op.value} of {of}"
        reason = f"deadlock: waits for {awaited}; {_whereabouts(program, others, stuck)}"
        yield ProgramError(rank, index, reason)


def _whereabouts(program: Program, ranks: Sequence[int], stuck: dict[int, int]) -> str:
    places = [
        f"rank {rank} waits at {name(program, rank, program.ranks[rank][stuck[rank]])}"
        if rank in stuck
        else f"rank {rank} has come to its end"
        for rank in ranks[:_MOST_NAMED]
    ]
    more = [f"and {len(ranks) - _MOST_NAMED} more"] if len(ranks) > _MOST_NAMED else []
    return ", ".join([*places, *more])
