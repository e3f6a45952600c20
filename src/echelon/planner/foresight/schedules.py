"""Pipeline schedules in closed form: the seconds of a step, and how many microbatches a stage keeps.

With d stages, m microbatches, v chunks, and f + b = t seconds of a microbatch on a stage:

    schedule      a step of equal stages            kept on stage i (0-based)
    naive         m · d · t                         1
    gpipe         (m + d − 1) · t                   m
    1f1b          (m + d − 1) · t                   min(m, d − i)
    interleaved   m · t + (d − 1) · t / v           min(m·v, 2(d − i − 1) + (v − 1)·d + 1) / v
    zero-bubble   (m + d − 1) · t − (d − 1) · w     min(m, d − i), and weight gradients that wait for i more
    pipedream…    m · t (never drains)              d − i

The simulator of programs gives the same numbers (a test compares them); it would take seconds for thousands
of ranks. For unequal stages the slowest one sets the pace, and the others add to filling and draining.
"""

from collections.abc import Sequence

ASYNCHRONOUS = {"pipedream", "pipedream-vertical", "pipedream-2bw"}


def step_seconds(
    schedule: str, seconds: Sequence[float], microbatches: int, chunks: int = 1, weights: float = 0.0
) -> float:
    """Return the seconds of a step. `seconds`: of a microbatch on each stage (all chunks of a rank together).
    `weights`: of these, what gradients for weights take."""
    total, slowest = sum(seconds), max(seconds)
    if schedule == "naive":
        return microbatches * total
    if schedule in ASYNCHRONOUS:
        return microbatches * slowest
    fill = (total - slowest) / chunks
    if schedule == "zero-bubble":
        fill -= (len(seconds) - 1) * min(weights, slowest)
    return microbatches * slowest + max(0.0, fill)


def kept_microbatches(schedule: str, stages: int, stage: int, microbatches: int, chunks: int = 1) -> float:
    """Return how many microbatches a stage has saved activations of, at most; of all its chunks together."""
    if schedule == "naive":
        return 1.0
    if schedule == "gpipe":
        return float(microbatches)
    if schedule == "interleaved" and chunks > 1:
        ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
        return min(microbatches * chunks, ahead) / chunks
    if schedule == "zero-bubble":
        return float(min(microbatches, stages))
    return float(min(microbatches, stages - stage)) if schedule not in ASYNCHRONOUS else float(stages - stage)
