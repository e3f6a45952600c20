"""A error, and what every rule needs to tell one."""

from typing import NamedTuple

from echelon.program.instruction import Instruction, Program
from echelon.program.text import show_instruction


class ProgramError(NamedTuple):
    """Something wrong: on which rank, at which place of its list (None: something is not there), and why."""

    rank: int
    place: int | None
    reason: str


def name(program: Program, rank: int, its: Instruction) -> str:
    """An instruction as it is written on the line of `rank`."""
    return show_instruction(its, program.stages_of(rank))
