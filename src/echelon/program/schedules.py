"""Flushed schedules: in which order each rank computes. Pure functions, before anything is sent or reduced.

`1f1b` with 4 stages and 5 microbatches (also called PipeDream-flush):

    rank 0    F0 F1 F2 F3 B0 F4 B1 B2 B3 B4      d−1 forwards ahead, then one forward, one backward
    rank 1    F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
    rank 2    F0 F1 B0 F2 B1 F3 B2 F4 B3 B4
    rank 3    F0 B0 F1 B1 F2 B2 F3 B3 F4 B4      the last stage starts each backward at once

A stage may have several replicas, which take microbatches in turn; each keeps the order of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, count, islice
from typing import NamedTuple

from echelon.program.instruction import Instruction, Op, Program

F, B, I, W = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT  # noqa: E741

Step = tuple[Op, int]  # an operation and its microbatch


class StageReplica(NamedTuple):
    """One replica of a stage.

    `ahead` counts the forwards before the first backward; `microbatches` are those that it works on.
    """

    stage: int
    ahead: int
    microbatches: Sequence[int]


def _naive(replica: StageReplica) -> Iterator[Step]:
    """One microbatch at a time: while one stage works, the others wait."""
    for k in replica.microbatches:
        yield F, k
        yield B, k


def _gpipe(replica: StageReplica) -> Iterator[Step]:
    """All forwards, then all backwards."""
    yield from ((F, k) for k in replica.microbatches)
    yield from ((B, k) for k in replica.microbatches)


def _one_forward_one_backward(replica: StageReplica) -> Iterator[Step]:
    """As few microbatches in flight as keep every stage busy."""
    forwards = iter(replica.microbatches)
    yield from ((F, k) for k in islice(forwards, replica.ahead))
    for k in replica.microbatches:
        yield from ((F, following) for following in islice(forwards, 1))
        yield B, k


def _zero_bubble(replica: StageReplica) -> Iterator[Step]:
    """1f1b with each backward in two parts.

    Gradients for inputs come at once, since the stage before waits for them. Those for weights are delayed by
    as many microbatches as there are stages before this one.
    """
    delayed: list[int] = []
    for op, k in _one_forward_one_backward(replica):
        if op is F:
            yield F, k
            continue
        yield I, k
        delayed.append(k)
        if len(delayed) > replica.stage:
            yield W, delayed.pop(0)
    yield from ((W, k) for k in delayed)


_ORDERS: dict[str, Callable[[StageReplica], Iterator[Step]]] = {
    "naive": _naive,
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "zero-bubble": _zero_bubble,
}


def flushed(name: str, replicas: Sequence[int], microbatches: int, chunks: int = 1) -> Program:
    """The schedule `name` over stages with these replicas; ranks are in the order of their stages."""
    if name == "interleaved":
        return _interleaved(len(replicas), microbatches, chunks)
    rank_numbers = count()
    placement = tuple(tuple(next(rank_numbers) for _ in range(number)) for number in replicas)
    ranks_from = [*accumulate(reversed(replicas))][::-1]  # for each stage the ranks from there to the last
    ranks = []
    for stage, holders in enumerate(placement):
        ahead = -(-ranks_from[stage] // len(holders)) - 1  # one for each rank behind, shared by the replicas
        for number in range(len(holders)):
            replica = StageReplica(stage, ahead, range(number, microbatches, len(holders)))
            ranks.append(tuple(Instruction(op, stage, k) for op, k in _ORDERS[name](replica)))
    return Program(name, placement, microbatches, tuple(ranks))


def _interleaved(depth: int, microbatches: int, chunks: int) -> Program:
    """1f1b over d·v stages, of which rank r holds r, r+d, r+2d …: the bubble shrinks by v.

    Microbatches go in rounds of d: the rank's first chunk works on all of a round, then its second, …
    """
    assert microbatches % depth == 0, (microbatches, depth)
    total = microbatches * chunks
    ranks = []
    for rank in range(depth):
        forwards = [_forward_of(rank, depth, chunks, number) for number in range(total)]
        # A backward pass goes through the chunks from the last to the first.
        backwards = [(depth * (chunks - 1) + 2 * rank - stage, k) for stage, k in forwards]
        ahead = total if microbatches == depth else 2 * (depth - 1 - rank) + (chunks - 1) * depth
        ranks.append(tuple(_alternate(forwards, backwards, min(ahead, total))))
    placement = tuple((stage % depth,) for stage in range(depth * chunks))
    return Program("interleaved", placement, microbatches, tuple(ranks))


def _forward_of(rank: int, depth: int, chunks: int, number: int) -> tuple[int, int]:
    """The stage and microbatch of a rank's forward `number`."""
    round_, rest = divmod(number, depth * chunks)
    chunk, offset = divmod(rest, depth)
    return rank + chunk * depth, round_ * depth + offset


def _alternate(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], ahead: int
) -> Iterator[Instruction]:
    for stage, k in forwards[:ahead]:
        yield Instruction(F, stage, k)
    for number, (stage, k) in enumerate(backwards):
        if ahead + number < len(forwards):
            yield Instruction(F, *forwards[ahead + number])
        yield Instruction(B, stage, k)


def forward_only(placement: Sequence[Sequence[int]], microbatches: int) -> Program:
    """Every microbatch through every stage, without training."""
    forwards: dict[int, list[Instruction]] = {}
    for k in range(microbatches):
        for stage, holders in enumerate(placement):
            forwards.setdefault(holders[k % len(holders)], []).append(Instruction(F, stage, k))
    num_ranks = 1 + max(rank for holders in placement for rank in holders)
    ranks = tuple(tuple(forwards.get(rank, ())) for rank in range(num_ranks))
    return Program("forward", tuple(map(tuple, placement)), microbatches, ranks)
