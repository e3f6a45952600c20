"""A step as a program: instructions, schedules, lowering, check, simulation. Pure: no torch, no device."""

from echelon.program.asynchronous import ASYNCHRONOUS, asynchronous
from echelon.program.build import SCHEDULES, build
from echelon.program.check import check
from echelon.program.instruction import COMPUTE, Instruction, Op, Program
from echelon.program.load import load_schedule
from echelon.program.lower import add_gathers, add_reductions, add_transfers
from echelon.program.schedules import flushed, forward_only
from echelon.program.simulate import Costs, Span, Timeline, simulate
from echelon.program.text import parse, show

__all__ = [
    "ASYNCHRONOUS",
    "COMPUTE",
    "SCHEDULES",
    "Costs",
    "Instruction",
    "Op",
    "Program",
    "Span",
    "Timeline",
    "add_gathers",
    "add_reductions",
    "add_transfers",
    "asynchronous",
    "build",
    "check",
    "flushed",
    "forward_only",
    "load_schedule",
    "parse",
    "show",
    "simulate",
]
