"""A step as a program: instructions, schedules, lowering, check, simulation. Pure: no torch, no device."""

from echelon.program.build import build, complete, load_schedule
from echelon.program.check import check
from echelon.program.instruction import (
    AFTER_FORWARDS,
    COMPUTE,
    COPIES,
    RANK_LEVEL,
    RECEIVES,
    SENDS,
    Instruction,
    Op,
    Program,
)
from echelon.program.lower import (
    add_copies,
    add_gathers,
    add_transfers,
    add_update,
    split_update,
    without_update,
)
from echelon.program.schedules import asynchronous, flushed, forward_only
from echelon.program.simulate import Costs, Span, Timeline, simulate
from echelon.program.text import parse, show

__all__ = [
    "AFTER_FORWARDS",
    "COMPUTE",
    "COPIES",
    "RANK_LEVEL",
    "RECEIVES",
    "SENDS",
    "Costs",
    "Instruction",
    "Op",
    "Program",
    "Span",
    "Timeline",
    "add_copies",
    "add_gathers",
    "add_transfers",
    "add_update",
    "asynchronous",
    "build",
    "check",
    "complete",
    "flushed",
    "forward_only",
    "load_schedule",
    "parse",
    "show",
    "simulate",
    "split_update",
    "without_update",
]
