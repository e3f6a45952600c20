"""Rules of copies: what a forward saved is fetched from host memory between its S and its backward.

F0 S0 … T0 B0
F0 S0 … T0 I0 … T0 W0
"""

from collections.abc import Iterator, Sequence

from echelon.program.instruction import COPIES, Instruction, Op, Program
from echelon.program.readiness import BACKWARDS
from echelon.program.rules.error import ProgramError, word

_Slot = tuple[int, int | None]  # stage, microbatch


def find_copy_errors(program: Program) -> Iterator[ProgramError]:
    """What is stored is fetched before each part of its backward, and not behind it."""
    for rank, instructions in enumerate(program.ranks):
        if any(instruction.op in COPIES for instruction in instructions):
            yield from _of_rank(program, rank, instructions)


def _of_rank(program: Program, rank: int, instructions: Sequence[Instruction]) -> Iterator[ProgramError]:
    stored: dict[_Slot, int] = {}  # where its S stands
    away: set[_Slot] = set()
    begun: set[_Slot] = set()  # of which the backward has begun
    gone: set[_Slot] = set()  # of which it is over
    for index, instruction in enumerate(instructions):
        op, stage, microbatch, _, _ = instruction
        slot = stage, microbatch
        if op is Op.STORE:
            stored[slot] = index
            away.add(slot)
        if op in COPIES and slot in (begun if op is Op.STORE else gone):
            away.discard(slot)
            yield ProgramError(rank, index, "its backward stands before it: nothing is left to copy")
        elif op is Op.FETCH:
            away.discard(slot)
        elif op in BACKWARDS:
            if slot in away:
                fetch = word(program, rank, instruction._replace(op=Op.FETCH, version=None))
                reason = f"what its forward saved is in host memory: put {fetch} before it"
                yield ProgramError(rank, index, reason)
                away.discard(slot)
            begun.add(slot)
            if op is not Op.BACKWARD_INPUT:
                gone.add(slot)
            elif slot in stored:
                away.add(slot)
    for slot, index in stored.items():
        if slot in away and slot not in begun:
            yield ProgramError(rank, index, "is never fetched: put its T before the backward")
