"""What a rank keeps while it runs its list: microbatches in flight, and versions of the weights.

Both follow from the order of the rank's own instructions, whatever they cost and whenever they run.
"""

from itertools import accumulate

from echelon.program.instruction import Op, Program

_KEPT = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_WEIGHT: -1}
_STASHED = {Op.STASH: 1, Op.POP: -1}


def in_flight(program: Program) -> tuple[int, ...]:
    """For each rank the most (stage, microbatch) pairs whose activations are alive at once.

    They live from the forward to the backward; to the backward for weights, where it is cut in two.
    """
    return _peaks(program, _KEPT)


def versions(program: Program) -> tuple[int, ...]:
    """For each rank the most versions of the weights at once: the newest, and those that are stashed."""
    return tuple(1 + peak for peak in _peaks(program, _STASHED))


def _peaks(program: Program, change: dict[Op, int]) -> tuple[int, ...]:
    # `accumulate` gives the count after each instruction.
    return tuple(
        max(accumulate((change.get(its.op, 0) for its in instructions), initial=0))
        for instructions in program.ranks
    )
