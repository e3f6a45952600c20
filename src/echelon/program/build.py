"""From a schedule's name to the whole program of a step: what a plan runs and `echelon schedule` shows."""

from collections.abc import Sequence

from echelon.errors import UserError
from echelon.plan import ASYNCHRONOUS_SCHEDULES
from echelon.program.instruction import Program
from echelon.program.lower import add_copies, add_gathers, add_transfers, add_update
from echelon.program.pipedream import asynchronous
from echelon.program.schedules import flushed


def build(
    name: str,
    replicas: Sequence[int],
    microbatches: int,
    chunks: int = 1,
    *,
    gather: bool = False,
    copies: bool = False,
    ties: bool = False,
) -> Program:
    """The program of one step that starts and ends with an empty pipeline.

    `gather`: the weights are sharded and gathered for each use (zero=3). `copies`: what forwards save is in
    host memory until the backward (offload=activations). `ties`: several stages hold the same weights and sum
    their gradients.
    """
    if name in ASYNCHRONOUS_SCHEDULES:
        if ties:
            raise UserError(
                f"schedule={name}: tied stages would update at different times; use schedule=1f1b"
            )
        program = asynchronous(name, len(replicas), microbatches)
    else:
        program = add_update(flushed(name, replicas, microbatches, chunks), ties=ties)
    program = add_transfers(program)
    program = add_copies(program) if copies else program
    return add_gathers(program) if gather else program
