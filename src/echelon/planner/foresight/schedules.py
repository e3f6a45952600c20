"""Pipeline schedules in closed form: the seconds of a step, and how many microbatches a stage keeps.

With d stages, m microbatches, v chunks, and f + b = t seconds of a microbatch on a stage:

    schedule      a step of equal stages            kept on stage i (0-based)
    naive         m · d · t                         1
    gpipe         (m + d − 1) · t                   m
    1f1b          (m + d − 1) · t                   min(m, d − i)
    interleaved   m · t + (d − 1) · t / v           min(m·v, 2(d − i − 1) + (v − 1)·d + 1) / v
    zero-bubble   (m + d − 1) · t − 2(d − 1) · w    min(m, d)      (w: gradients for weights; m ≥ d)
    pipedream…    m · t (never drains)              d − i

The simulator of programs gives the same numbers (a test compares them); it would take seconds for thousands
of ranks. Of unequal stages, each one alone would need

    what comes before it, both ways + m · t + what comes after it, less the forwards that fill that wait

and the slowest of these is the step, to a few percent.
"""

from collections.abc import Sequence
from functools import lru_cache

ASYNCHRONOUS = {"pipedream", "pipedream-vertical", "pipedream-2bw"}
_FORWARD_SHARE = 1 / 3  # of a microbatch: the backward pass takes twice as long


def step_seconds(
    schedule: str, seconds: Sequence[float], microbatches: int, chunks: int = 1, weights: float = 0.0
) -> float:
    """Return the seconds of a step. `seconds`: of a microbatch on each stage (all chunks of a rank together).
    `weights`: of these, what gradients for weights take."""
    if schedule == "naive":
        return microbatches * sum(seconds)
    if schedule in ASYNCHRONOUS:
        return microbatches * max(seconds)
    paces = _paces(tuple(seconds))
    step = max(microbatches * pace + wait / chunks for pace, wait in paces)
    if schedule == "zero-bubble":
        stages = len(seconds)
        filled = (stages - 1 + min(microbatches, stages) - 1) * weights
        step = max(step - filled, microbatches * max(seconds))
    return step


@lru_cache(maxsize=4096)
def _paces(seconds: tuple[float, ...]) -> tuple[tuple[float, float], ...]:
    """For stages that differ: the seconds of a microbatch, and those in which the stage waits."""
    paces: dict[float, float] = {}
    before, after = 0.0, sum(seconds)
    for stage, pace in enumerate(seconds):
        after -= pace
        filled = (len(seconds) - 1 - stage) * _FORWARD_SHARE * pace
        paces[pace] = max(paces.get(pace, 0.0), before + max(0.0, after - filled))
        before += pace
    return tuple(paces.items())


def kept_microbatches(
    schedule: str, stages: int, stage: int, microbatches: int, chunks: int = 1, fills_first: bool = True
) -> float:
    """Return how many microbatches a stage has saved activations of, at most; of all its chunks together.

    `fills_first`: with as many microbatches as stages, an interleaved schedule runs all forwards first.
    """
    if schedule == "naive":
        return 1.0
    if schedule == "gpipe":
        return float(microbatches)
    if schedule == "interleaved" and chunks > 1:
        if microbatches == stages and fills_first:
            return float(microbatches)
        ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
        return min(microbatches * chunks, ahead) / chunks
    if schedule == "zero-bubble":
        return float(min(microbatches, stages))
    return float(min(microbatches, stages - stage)) if schedule not in ASYNCHRONOUS else float(stages - stage)
