"""From a schedule's name to the whole program of a step: what a plan runs and `echelon schedule` shows."""

from collections.abc import Sequence

from echelon.program.asynchronous import ASYNCHRONOUS, asynchronous
from echelon.program.instruction import Program
from echelon.program.lower import add_gathers, add_reductions, add_transfers
from echelon.program.schedules import flushed

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble", *ASYNCHRONOUS)


def build(
    name: str, replicas: Sequence[int], microbatches: int, chunks: int = 1, *, gather: bool = False
) -> Program:
    """The program of one step that starts and ends with an empty pipeline.

    `gather`: the weights are shared out and come together for each use (zero=3).
    """
    if name in ASYNCHRONOUS:
        program = asynchronous(name, len(replicas), microbatches)
    else:
        program = add_reductions(flushed(name, replicas, microbatches, chunks))
    program = add_transfers(program)
    return add_gathers(program) if gather else program
