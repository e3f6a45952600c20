"""What theory says of each schedule: the bubble, microbatches in flight, versions of the weights.

With d stages, m microbatches, v chunks, and stage i of d (counted from 0):

    schedule              bubble               in flight on stage i              versions
    naive                 (d−1) / d            1                                 1
    gpipe                 (d−1) / (m+d−1)      m                                 1
    1f1b                  (d−1) / (m+d−1)      d−i                               1
    interleaved           (d−1) / (v·m+d−1)    2(d−1−i) + (v−1)·d + 1 chunks     1
    zero-bubble           (d−1) / (2m+d−1)     d                                 1
    pipedream             as 1f1b, once        d−i                               d−i
    pipedream-vertical    as 1f1b, once        d−i                               d
    pipedream-2bw         as 1f1b, once        d−i                               2

The table is for m ≥ d microbatches (more for some). The functions are exact for fewer too, and a test
compares every schedule with them. A forward takes as long as a backward, of which half is for inputs;
transfers take no time. The pipedream schedules have the bubble once, when they fill and drain; m is the
number of all microbatches in between.
"""

from collections.abc import Sequence
from fractions import Fraction

from echelon.plan import ASYNCHRONOUS_SCHEDULES


def bubble(name: str, stages: int, microbatches: int, chunks: int = 1) -> Fraction:
    """The idle part of all ranks' time, when forward and backward take the same time and transfers none."""
    idle, work = Fraction(stages - 1), microbatches
    if name == "naive":
        idle *= microbatches
    elif name == "interleaved":
        work *= chunks
    elif name == "zero-bubble":
        idle += Fraction(max(0, stages - microbatches), 2)  # too few weight gradients to fill it
        work *= 2
    return idle / (work + idle)


def in_flight(name: str, replicas: Sequence[int], microbatches: int, chunks: int = 1) -> tuple[int, ...]:
    """For each rank the most (stage, microbatch) pairs whose activations it keeps."""
    if name == "interleaved":
        return _in_flight_interleaved(len(replicas), microbatches, chunks)
    peaks = []
    for stage, num_replicas in enumerate(replicas):
        behind = -(-sum(replicas[stage:]) // num_replicas)  # the ranks from here on, shared by the replicas
        bound = {"naive": 1, "gpipe": microbatches, "zero-bubble": behind + stage}.get(name, behind)
        shares = [len(range(replica, microbatches, num_replicas)) for replica in range(num_replicas)]
        peaks += [min(share, bound) for share in shares]
    return tuple(peaks)


def _in_flight_interleaved(depth: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    total = microbatches * chunks
    if microbatches == depth:
        return (total,) * depth
    return tuple(min(total, 2 * (depth - 1 - rank) + (chunks - 1) * depth + 1) for rank in range(depth))


def versions(name: str, stages: int, taken: int, microbatches: int) -> tuple[int, ...]:
    """For each stage the most versions at once, after `taken` microbatches in batches of `microbatches`."""
    if name not in ASYNCHRONOUS_SCHEDULES or taken < 2:
        return (1,) * stages
    if name == "pipedream-2bw":
        return (1 if taken <= microbatches else 2,) * stages
    delays = [stages - 1 if name == "pipedream-vertical" else stages - 1 - stage for stage in range(stages)]
    # A version is kept only if a microbatch used it: the last microbatch used version taken − 1 − delay.
    return tuple(1 + min(delay, max(0, taken - 1 - delay) + 1) for delay in delays)
