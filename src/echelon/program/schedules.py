"""Flushed schedules: in which order each rank computes. Pure functions, before anything is sent or reduced.

`1f1b` with 4 stages and 5 microbatches (also called PipeDream-flush):

    rank 0    F0 F1 F2 F3 B0 F4 B1 B2 B3 B4      d−1 forwards ahead, then one forward, one backward
    rank 1    F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
    rank 2    F0 F1 B0 F2 B1 F3 B2 F4 B3 B4
    rank 3    F0 B0 F1 B1 F2 B2 F3 B3 F4 B4      the last stage turns each microbatch round at once

A stage may have several replicas, which take microbatches in turn; each keeps the order of its own ones.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple

from echelon.program.instruction import Instruction, Op, Program

F, B, I, W = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT  # noqa: E741

Step = tuple[Op, int]  # what to do with which microbatch


class Place(NamedTuple):
    """Where a rank stands: its stage, the replicas of every stage, and the microbatches that are its own."""

    stage: int
    replicas: Sequence[int]
    own: Sequence[int]

    @property
    def ahead(self) -> int:
        """How many forwards run before the first backward: one for each rank behind, shared by replicas."""
        return -(-sum(self.replicas[self.stage :]) // self.replicas[self.stage]) - 1


def _naive(place: Place) -> Iterator[Step]:
    """One microbatch at a time: while one stage works, the others wait."""
    for k in place.own:
        yield F, k
        yield B, k


def _gpipe(place: Place) -> Iterator[Step]:
    """All forwards, then all backwards."""
    yield from ((F, k) for k in place.own)
    yield from ((B, k) for k in place.own)


def _one_forward_one_backward(place: Place) -> Iterator[Step]:
    """As few microbatches in flight as keep every stage busy."""
    forwards = iter(place.own)
    yield from ((F, k) for k in islice(forwards, place.ahead))
    for k in place.own:
        yield from ((F, following) for following in islice(forwards, 1))
        yield B, k


def _zero_bubble(place: Place) -> Iterator[Step]:
    """1f1b whose backwards are cut in two: gradients for inputs at once, since the stage before waits for
    them; those for weights later, by as many microbatches as there are stages before this one."""
    late: list[int] = []
    for op, k in _one_forward_one_backward(place):
        if op is F:
            yield F, k
            continue
        yield I, k
        late.append(k)
        if len(late) > place.stage:
            yield W, late.pop(0)
    yield from ((W, k) for k in late)


_EVEN: dict[str, Callable[[Place], Iterator[Step]]] = {
    "naive": _naive,
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "zero-bubble": _zero_bubble,
}


def flushed(name: str, replicas: Sequence[int], microbatches: int, chunks: int = 1) -> Program:
    """The schedule `name` over stages with these replicas; ranks stand in the order of their stages."""
    if name == "interleaved":
        return _interleaved(len(replicas), microbatches, chunks)
    numbers = count()
    placement = tuple(tuple(next(numbers) for _ in range(its)) for its in replicas)
    ranks = []
    for stage, holders in enumerate(placement):
        for replica in range(len(holders)):
            own = range(replica, microbatches, len(holders))
            steps = _EVEN[name](Place(stage, replicas, own))
            ranks.append(tuple(Instruction(op, stage, k) for op, k in steps))
    return Program(name, placement, microbatches, tuple(ranks))


def _interleaved(depth: int, microbatches: int, chunks: int) -> Program:
    """1f1b over d·v stages, of which rank r holds r, r+d, r+2d …: the bubble shrinks by v.

    Microbatches go in rounds of d: the rank's first chunk works on all of a round, then its second, …
    """
    assert microbatches % depth == 0, (microbatches, depth)
    total = microbatches * chunks
    ranks = []
    for rank in range(depth):
        forwards = [_turn(rank, depth, chunks, number) for number in range(total)]
        # A backward pass goes through the chunks from the last to the first.
        backwards = [(depth * (chunks - 1) + 2 * rank - stage, k) for stage, k in forwards]
        ahead = total if microbatches == depth else 2 * (depth - 1 - rank) + (chunks - 1) * depth
        ranks.append(tuple(_alternate(forwards, backwards, min(ahead, total))))
    placement = tuple((stage % depth,) for stage in range(depth * chunks))
    return Program("interleaved", placement, microbatches, tuple(ranks))


def _turn(rank: int, depth: int, chunks: int, number: int) -> tuple[int, int]:
    """The stage and microbatch of a rank's forward `number`."""
    round_, within = divmod(number, depth * chunks)
    chunk, place = divmod(within, depth)
    return rank + chunk * depth, round_ * depth + place


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
    stages_of: dict[int, list[tuple[int, int]]] = {}
    for k in range(microbatches):
        for stage, holders in enumerate(placement):
            stages_of.setdefault(holders[k % len(holders)], []).append((stage, k))
    size = 1 + max(rank for holders in placement for rank in holders)
    ranks = tuple(tuple(Instruction(F, stage, k) for stage, k in stages_of.get(r, [])) for r in range(size))
    return Program("forward", tuple(map(tuple, placement)), microbatches, ranks)
