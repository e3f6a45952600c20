"""A fault, and what every rule needs to tell one."""

from collections.abc import Iterator
from typing import NamedTuple

from echelon.program.instruction import Instruction, Program
from echelon.program.text import show_instruction


class Fault(NamedTuple):
    """Something wrong: on which rank, at which place of its list (None: something is not there), and why."""

    rank: int
    place: int | None
    reason: str


def each(program: Program) -> Iterator[tuple[int, int, Instruction]]:
    """Every instruction, with its rank and place."""
    for rank, instructions in enumerate(program.ranks):
        for place, its in enumerate(instructions):
            yield rank, place, its


def name(program: Program, rank: int, its: Instruction) -> str:
    """An instruction as it is written on the line of `rank`."""
    return show_instruction(its, program.stages_of(rank))
