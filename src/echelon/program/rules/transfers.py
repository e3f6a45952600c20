"""Rules between ranks: sends and receives match in order, and no rank waits forever."""

from collections import Counter
from collections.abc import Iterator, Sequence

from echelon.program.instruction import SENDS, Instruction, Op, Program
from echelon.program.readiness import Channel, counterpart, partners, walk
from echelon.program.rules.error import ProgramError, word

_MOST_NAMED = 5  # ranks in one sentence

Receives = list[tuple[int, Instruction]]  # of a channel, each with the index of the receive or of its send


def find_unmatched_transfers(program: Program) -> Iterator[ProgramError]:
    """On each channel from rank to rank the receives match the sends, in their order."""
    sends: dict[Channel, list[int]] = {}
    receives: dict[Channel, list[int]] = {}
    for rank, instructions in enumerate(program.ranks):
        for index, (op, _, _, peer, _) in enumerate(instructions):
            if peer is not None:  # only transfers have one, or `find_misplaced` would have reported it
                indexes, channel = (sends, (rank, peer)) if op in SENDS else (receives, (peer, rank))
                indexes.setdefault(channel, []).append(index)
    for channel in sorted(sends.keys() | receives.keys()):
        sender, receiver = channel
        sent = [
            (index, counterpart(sender, program.ranks[sender][index])) for index in sends.get(channel, [])
        ]
        received = [(index, program.ranks[receiver][index]) for index in receives.get(channel, [])]
        if [receive for _, receive in sent] != [receive for _, receive in received]:
            yield from _unmatched_on(program, channel, sent, received)


def _unmatched_on(
    program: Program, channel: Channel, sent: Receives, received: Receives
) -> Iterator[ProgramError]:
    sender, receiver = channel
    surplus = Counter(receive for _, receive in sent)
    surplus.subtract(receive for _, receive in received)
    if not any(surplus.values()):
        yield from _wrong_order(program, channel, sent, received)
    for index, receive in sent:
        if surplus[receive] > 0:
            surplus[receive] -= 1
            missing = word(program, receiver, receive)
            yield ProgramError(sender, index, f"rank {receiver} never receives it: it has no {missing}")
    for index, receive in received:
        if surplus[receive] < 0:
            surplus[receive] += 1
            missing = word(program, sender, counterpart(receiver, receive))
            yield ProgramError(receiver, index, f"rank {sender} never sends it: it has no {missing}")


def _wrong_order(
    program: Program, channel: Channel, sent: Receives, received: Receives
) -> Iterator[ProgramError]:
    """Only the first receive that differs: the later ones follow from it."""
    sender, receiver = channel
    for number, ((_, expected), (index, receive)) in enumerate(zip(sent, received, strict=True), 1):
        if expected != receive:
            send = word(program, sender, counterpart(receiver, expected))
            reason = f"receives the wrong message: message {number} from rank {sender} is that of {send}"
            yield ProgramError(receiver, index, f"{reason}; receive in the order of the sends")
            return


def find_deadlocks(program: Program) -> Iterator[ProgramError]:
    """All ranks come to the end, whatever the instructions cost."""
    reached = Counter(rank for rank, _, _ in walk(program))
    stuck = {rank: reached[rank] for rank, work in enumerate(program.ranks) if reached[rank] < len(work)}
    for rank, index in stuck.items():
        instruction = program.ranks[rank][index]
        if instruction.peer is not None:
            others = [instruction.peer]
            awaited = word(program, instruction.peer, counterpart(rank, instruction))
        else:
            others = sorted(partners(program, instruction.op, instruction.stage) - {rank})
            of = f"stage {instruction.stage}" if instruction.op is Op.REDUCE else "every rank"
            awaited = f"{instruction.op.value} of {of}"
        reason = f"deadlock: waits for {awaited}; {_whereabouts(program, others, stuck)}"
        yield ProgramError(rank, index, reason)


def _whereabouts(program: Program, ranks: Sequence[int], stuck: dict[int, int]) -> str:
    sentences = [
        f"rank {rank} waits at {word(program, rank, program.ranks[rank][stuck[rank]])}"
        if rank in stuck
        else f"rank {rank} has ended"
        for rank in ranks[:_MOST_NAMED]
    ]
    more = [f"and {len(ranks) - _MOST_NAMED} more"] if len(ranks) > _MOST_NAMED else []
    return ", ".join([*sentences, *more])
