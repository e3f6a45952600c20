"""Rules of copies: what a forward saved is fetched from host memory between its S and its backward.

F0 S0 … T0 B0
"""

from collections.abc import Iterator, Sequence

from echelon.program.instruction import COPIES, Instruction, Op, Program
from echelon.program.readiness import GRADIENT
from echelon.program.rules.error import ProgramError, word


def find_copy_errors(program: Program) -> Iterator[ProgramError]:
    """What is stored is fetched before its backward, and not behind it."""
    for rank, instructions in enumerate(program.ranks):
        if any(instruction.op in COPIES for instruction in instructions):
            yield from _of_rank(program, rank, instructions)


def _of_rank(program: Program, rank: int, instructions: Sequence[Instruction]) -> Iterator[ProgramError]:
    away: dict[tuple[int, int | None], int] = {}  # by stage and microbatch: where its S stands
    gone: set[tuple[int, int | None]] = set()  # of which the backward is over
    for index, instruction in enumerate(instructions):
        op, stage, microbatch, _, _ = instruction
        slot = stage, microbatch
        if op is Op.STORE:
            away[slot] = index
        if op in COPIES and slot in gone:
            yield ProgramError(rank, index, "its backward stands before it: nothing is left to copy")
        elif op is Op.FETCH:
            away.pop(slot, None)
        elif op in GRADIENT:
            gone.add(slot)
            if slot in away:
                fetch = word(program, rank, instruction._replace(op=Op.FETCH, version=None))
                reason = f"what its forward saved is in host memory: put {fetch} before it"
                yield ProgramError(rank, index, reason)
                del away[slot]
    for index in away.values():
        yield ProgramError(rank, index, "is never fetched: put its T before the backward")
