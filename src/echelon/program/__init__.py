"""A step as a program: instructions, schedules, lowering, check, simulation. Pure: no torch, no device."""

from echelon.program.asynchronous import ASYNCHRONOUS, asynchronous
from echelon.program.build import SCHEDULES, build
from echelon.program.instruction import Instruction, Op, Program
from echelon.program.lower import add_gathers, add_reductions, add_transfers
from echelon.program.schedules import flushed, forward_only

__all__ = [
    "ASYNCHRONOUS",
    "SCHEDULES",
    "Instruction",
    "Op",
    "Program",
    "add_gathers",
    "add_reductions",
    "add_transfers",
    "asynchronous",
    "build",
    "flushed",
    "forward_only",
]
