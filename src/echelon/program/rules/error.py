"""An error of a program: where it is, and how it is reported."""

from collections.abc import Mapping
from dataclasses import dataclass

from echelon.program.instruction import Instruction, Program
from echelon.program.text import show_instruction


@dataclass(frozen=True)
class ProgramError:
    """An error on a rank, at an index of its list (None: an instruction is missing), and the reason."""

    rank: int
    index: int | None
    reason: str

    def sentence(self, program: Program, lines: Mapping[int, int]) -> str:
        """The error as the user reads it. `lines` has the line of each rank, if they are from a file."""
        line = f"line {lines[self.rank]}, " if self.rank in lines else ""
        where = f"{line}rank {self.rank}"
        if self.index is not None:
            where += f", {word(program, self.rank, program.ranks[self.rank][self.index])}"
        return f"{where}: {self.reason}"


def word(program: Program, rank: int, instruction: Instruction) -> str:
    """An instruction as it is written on the line of `rank`."""
    return show_instruction(instruction, program.stages_of(rank))
