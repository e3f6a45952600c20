"""Which layers form segments."""

from collections.abc import Sequence
from itertools import pairwise
from math import isqrt
from typing import TypeVar

from echelon.program import COMPUTE, Op, Program

T = TypeVar("T")


def divide(layers: Sequence[T], recompute: str) -> list[list[T]]:
    """The segments of a stage's layers.

    divide([0, 1, 2, 3], "full")        # [[0], [1], [2], [3]]
    divide([0, 1, 2, 3], "sqrt")        # [[0, 1], [2, 3]]
    """
    assert recompute in ("full", "sqrt"), recompute
    if recompute == "full":
        return [[layer] for layer in layers]
    number = isqrt(len(layers) - 1) + 1  # rounded up
    base, more = divmod(len(layers), number)
    edges = [index * base + min(index, more) for index in range(number + 1)]
    return [list(layers[begin:end]) for begin, end in pairwise(edges)]


def backward_follows(program: Program, stage: int) -> bool:
    """Whether each microbatch goes back through `stage` right after it came forward: what its last layers
    save is needed at once, and nothing is gained if it is dropped."""
    if stage != program.stages - 1:
        return False
    for rank in program.placement[stage]:
        ops = [each for each in program.ranks[rank] if each.stage == stage and each.op in COMPUTE]
        for one, following in pairwise(ops):
            is_forward = one.op is Op.FORWARD
            if is_forward and (following.op is Op.FORWARD or following.microbatch != one.microbatch):
                return False
    return True
