"""One rank's part of a program, with what follows from it."""

from collections.abc import Iterator, Sequence
from functools import cached_property

from echelon.program import AFTER_FORWARDS, RECEIVES, SENDS, Instruction, Op, Program
from echelon.program.readiness import counterpart

Slot = tuple[int, int]  # stage, microbatch


class Script:
    """The instructions of one rank, and what the interpreter must know of them beforehand."""

    def __init__(
        self, program: Program, rank: int, *, empties: bool = True, sums: bool = True, continues: bool = False
    ) -> None:
        """`empties`: when the program is over, no rank has anything on its way. `sums`: REDUCE sums gradients
        over ranks; else they add up here, for one that comes later. `continues`: it is the end of a step that
        another program began, and has no messages."""
        self.program, self.rank, self.empties = program, rank, empties
        self.sums, self.continues = sums, continues
        self.instructions = program.ranks[rank]
        self.splits_backward = any(i.op is Op.BACKWARD_INPUT for i in self.instructions)
        self.labels = [_label(instruction) for instruction in self.instructions]
        self.lasts = frozenset(self._last_backwards() if sums else ())
        # Where the first backward pass begins, or what follows it on other ranks; None: there is none.
        self.first_backward = next(
            (place for place, i in enumerate(self.instructions) if i.op in AFTER_FORWARDS and not continues),
            None,
        )
        self.receives: dict[int, list[Instruction]] = {}
        for instruction in self.instructions:
            if instruction.op in RECEIVES:
                self.receives.setdefault(peer_of(instruction), []).append(instruction)

    @cached_property
    def in_flight(self) -> dict[int, list[Instruction]]:
        """By peer: the receives of its messages to this rank that are left to a later program."""
        senders = [sender for sender, receiver in self.program.pairs if receiver == self.rank]
        left = {peer: _left_in_flight(self.program, peer, self.rank) for peer in senders}
        return {peer: receives for peer, receives in left.items() if receives}

    @cached_property
    def acknowledged(self) -> dict[int, list[int]]:
        """By peer, for each of its messages to this rank: how many messages that this rank sends in this
        program it has received before it sends that one."""
        return {peer: self._acknowledged_by(peer) for peer in self.receives}

    def _acknowledged_by(self, peer: int) -> list[int]:
        early = [0] * _num_carried(self.program, peer, self.rank)
        carried = _num_carried(self.program, self.rank, peer)
        received = _received_before(self.program.ranks[peer], self.rank)
        return early + [max(0, count - carried) for count in received]

    def missing_rounds(self, stage: int) -> int:
        """Count the microbatches that this replica of `stage` has fewer than the busiest one."""
        own = sum(i.op is Op.FORWARD and i.stage == stage for i in self.instructions)
        return -(-self.program.microbatches // len(self.program.placement[stage])) - own

    def _last_backwards(self) -> Iterator[int]:
        """Yield the places of the last backward pass of each stage before its gradients are reduced."""
        latest: dict[int, int] = {}
        for place, instruction in enumerate(self.instructions):
            if instruction.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                latest[instruction.stage] = place
            elif instruction.op is Op.REDUCE and instruction.stage in latest:
                yield latest.pop(instruction.stage)


def _left_in_flight(program: Program, sender: int, receiver: int) -> list[Instruction]:
    """The receives of what one rank sends to another in a program, and the other does not receive in it."""
    received = set(program.ranks[receiver])
    return [receive for receive in _receives_of_sends(program, sender, receiver) if receive not in received]


def _num_carried(program: Program, sender: int, receiver: int) -> int:
    """Count the messages received in a program that were sent before it began."""
    sent = set(_receives_of_sends(program, sender, receiver))
    return sum(
        instruction.op in RECEIVES and instruction.peer == sender and instruction not in sent
        for instruction in program.ranks[receiver]
    )


def _receives_of_sends(program: Program, sender: int, receiver: int) -> Iterator[Instruction]:
    for instruction in program.ranks[sender]:
        if instruction.op in SENDS and instruction.peer == receiver:
            yield counterpart(sender, instruction)


def _received_before(instructions: Sequence[Instruction], peer: int) -> Iterator[int]:
    """For each message to `peer`, how many messages from it are received earlier."""
    received = 0
    for instruction in instructions:
        if instruction.op in RECEIVES and instruction.peer == peer:
            received += 1
        elif instruction.op in SENDS and instruction.peer == peer:
            yield received


def peer_of(instruction: Instruction) -> int:
    assert instruction.peer is not None
    return instruction.peer


def slot_of(instruction: Instruction) -> Slot:
    return instruction.stage, microbatch_of(instruction)


def microbatch_of(instruction: Instruction) -> int:
    assert instruction.microbatch is not None
    return instruction.microbatch


def _label(instruction: Instruction) -> str:
    """Name an instruction for the report of a hang: 'RG5 of stage 1, microbatch 5'."""
    place = f"of stage {instruction.stage}"
    if instruction.microbatch is None:
        return f"{instruction.op.value} {place}"
    return f"{instruction.op.value}{instruction.microbatch} {place}, microbatch {instruction.microbatch}"
