"""Findings by measurement: memory and arithmetic of one thread, the start of ranks, messages between two.

Each figure is a median of a few tries on a machine that may be busy: an order of magnitude. `benchmarks`
makes reliable comparisons.
"""

import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

from echelon.cli.doctor.report import Finding, Section, section
from echelon.errors import UserError
from echelon.launching import RankFailed, Ranks
from echelon.quantities import MIB, show_bytes, show_rate, show_seconds

_COPY_BYTES = 64 * MIB  # beyond the caches of most processors
_MATRIX = 1024
_LARGE, _SMALL = 16 * MIB, 8
_DEADLINE = 20.0  # for ranks that hang on a broken machine


class AllReduceSeconds(NamedTuple):
    """Seconds of an all-reduce of a large and of a small buffer, on two ranks."""

    large: float
    small: float


def examine_speed() -> Section:
    return section(
        "Measured here",
        {
            "memory copy": lambda: [_memory_copy()],
            "matrix multiply": lambda: [_matrix_multiply()],
            "launch of 2 ranks": _two_ranks,
        },
    )


def _memory_copy() -> Finding:
    import torch

    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    with _one_thread():
        rate = _COPY_BYTES / _median_seconds(lambda: target.copy_(source), tries=7)
    return Finding("memory copy, one thread", show_rate(rate), number=rate)


def _matrix_multiply() -> Finding:
    import torch

    a, b = torch.rand(_MATRIX, _MATRIX), torch.rand(_MATRIX, _MATRIX)
    with _one_thread():
        rate = 2 * _MATRIX**3 / _median_seconds(lambda: a @ b, tries=5)
    return Finding("matrix multiply, one thread", f"{rate / 1e9:.0f} GFLOP/s in float32", number=rate)


def _two_ranks() -> list[Finding]:
    try:
        first, all_reduce = _start_and_run()
        again, _ = _start_and_run()
    except (RankFailed, UserError, OSError) as error:
        reason = str(error).splitlines()[0]
        remark = f"only plans of one rank run: {reason}"
        return [Finding("launch of 2 ranks", "fails", "warn", remark)]
    rate = _LARGE / all_reduce.large  # two ranks send 2(N−1)/N = 1 buffer each
    large = f"{show_rate(rate)} ({show_bytes(_LARGE)} in {show_seconds(all_reduce.large)})"
    return [
        Finding("launch of 2 ranks", f"{show_seconds(again)} (first: {show_seconds(first)})", number=again),
        Finding("all-reduce, 2 ranks, gloo", large, number=rate),
        Finding(
            "all-reduce latency",
            f"{show_seconds(all_reduce.small)} ({_SMALL} bytes)",
            number=all_reduce.small,
        ),
    ]


def _start_and_run() -> tuple[float, AllReduceSeconds]:
    """Return the seconds until two ranks had started, and what they measured."""
    start = time.perf_counter()
    with Ranks(2, backend="gloo", deadline=_DEADLINE) as ranks:
        seconds = time.perf_counter() - start
        return seconds, ranks.run(time_all_reduce)[0]


def time_all_reduce() -> AllReduceSeconds:
    """Measure, in both ranks."""
    import torch
    import torch.distributed as dist

    from echelon.collectives import Ledger, TorchGroup

    assert dist.group.WORLD is not None
    group = TorchGroup("data", dist.group.WORLD, Ledger())
    large, small = torch.zeros(_LARGE // 4), torch.zeros(_SMALL // 4)
    return AllReduceSeconds(
        _median_seconds(lambda: group.all_reduce(large), tries=7),
        _median_seconds(lambda: group.all_reduce(small), tries=50),
    )


def _median_seconds(fn: Callable[[], object], tries: int) -> float:
    fn()  # the first call pays for memory and connections
    return median(timeit.repeat(fn, number=1, repeat=tries))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread, as a launched rank does."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
