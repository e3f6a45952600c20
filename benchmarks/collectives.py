"""The bench `collectives`: several ways to sum a buffer over ranks.

The backend's own all_reduce is the baseline; the ring and the naive way are built from its send and recv. On
one host, shared memory is a fourth contender.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.compare import Row, compare, slowest
from benchmarks.harness import alternate, measuring_ranks, timed
from echelon.collectives import Group, Ledger, TorchGroup, group_over, naive_all_reduce, ring_all_reduce
from echelon.collectives.mesh import this_device
from echelon.quantities import KIB, MIB, show_bytes

_BASELINE = "backend"


class Measured(NamedTuple):
    """One rank's samples of one size, by contender, and the bytes that one call sends, from its ledger."""

    seconds: dict[str, list[float]]
    sent: dict[str, int]


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """All-reduce of the backend, as a ring, the naive way, and in shared memory, on 2 and 4 ranks."""
    counts = (2,) if quick else (2, 4)
    sizes = (KIB, 64 * KIB) if quick else (KIB, 64 * KIB, MIB, 16 * MIB)
    rounds = 3 if quick else 40
    rows = []
    for count in counts:
        with measuring_ranks(count) as ranks:
            for size in sizes:
                rows += _rows(count, size, ranks.run(measure, size, rounds))
    return {"ranks": list(counts), "buffer_bytes": list(sizes), "rounds": rounds}, rows


def measure(size: int, rounds: int) -> Measured:
    """Runs in every rank: all contenders on a buffer of `size` bytes."""
    assert dist.group.WORLD is not None
    group = TorchGroup("data", dist.group.WORLD, Ledger())
    buffer = torch.zeros(size // 4, device=this_device())  # zeros: sums of sums would soon overflow
    contenders: dict[str, Callable[[], object]] = {
        _BASELINE: partial(group.all_reduce, buffer),
        "ring": partial(ring_all_reduce, group, buffer),
        "naive": partial(naive_all_reduce, group, buffer),
    }
    chosen = group_over("data", dist.group.WORLD, group.ledger)
    if type(chosen) is not TorchGroup:
        contenders["shared"] = partial(chosen.all_reduce, buffer)
    sent = {name: _sent_by(work, group) for name, work in contenders.items()}
    contender_timers = {name: timed(work, before=group.barrier) for name, work in contenders.items()}
    return Measured(alternate(contender_timers, rounds), sent)


def _sent_by(work: Callable[[], object], group: Group) -> int:
    before = group.ledger.total().sent
    work()
    return group.ledger.total().sent - before


def _rows(count: int, size: int, ranks: Sequence[Measured]) -> list[Row]:
    rows = compare(f"{count} ranks, {show_bytes(size)}", slowest([rank.seconds for rank in ranks]), _BASELINE)
    return [dataclasses.replace(row, extras=_extras(row, count, size, ranks)) for row in rows]


def _extras(row: Row, count: int, size: int, ranks: Sequence[Measured]) -> dict[str, float]:
    # Bus bandwidth counts what a ring sends, so that figures of different rank counts can be compared.
    carried = 2 * (count - 1) / count * size
    return {
        "bus_bytes_per_second": carried / row.seconds.median,
        "busiest_rank_sent_bytes": max(rank.sent[row.contender] for rank in ranks),
    }
