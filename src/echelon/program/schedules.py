"""Schedules: in which order each rank computes. Pure functions, before anything is sent.

`1f1b` with 4 stages and 5 microbatches (also called PipeDream-flush):

    rank 0    F0 F1 F2 F3 B0 F4 B1 B2 B3 B4      d−1 forwards ahead, then one forward, one backward
    rank 1    F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
    rank 2    F0 F1 B0 F2 B1 F3 B2 F4 B3 B4
    rank 3    F0 B0 F1 B1 F2 B2 F3 B3 F4 B4      the last stage starts each backward at once

A stage may have several replicas, which take microbatches in turn; each keeps the order of its own.

The pipelines of PipeDream never drain, and a microbatch's backward uses the weights of its forward. With d
stages, stage i is d−1−i forwards ahead of its backwards, forever. Microbatch k uses, by schedule:

    pipedream             every update of stage i that came before its forward there: version k − (d−1−i)
    pipedream-vertical    at every stage the version that it used at stage 0: version k − (d−1)
    pipedream-2bw         one update for each batch of m microbatches; batch t uses version t − 1: two suffice

(and version 0 until those exist). A training step takes in some microbatches and leaves those in flight to
the next step; `drain` finishes them all. Numbers count from where the pipeline was last empty.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, count, islice
from typing import NamedTuple

from echelon.program.instruction import Instruction, Op, Program

F, B, I, W = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT  # noqa: E741

Step = tuple[Op, int]  # an operation and its microbatch


class StageReplica(NamedTuple):
    """One replica of a stage. `ahead` counts the forwards before the first backward; `microbatches` are those
    that it works on."""

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
    """1f1b with each backward in two parts. Gradients for inputs come at once, since the stage before waits
    for them. Those for weights are delayed by as many microbatches as there are stages before this one."""
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
    """1f1b over d·v stages, of which rank r holds r, r+d, r+2d …: the bubble shrinks by v. Microbatches go in
    rounds of d: the rank's first chunk works on all of a round, then its second, …"""
    assert microbatches % depth == 0, (microbatches, depth)
    total = microbatches * chunks
    ranks = []
    for rank in range(depth):
        forwards = []  # stage and microbatch of each
        for number in range(total):
            round_, rest = divmod(number, depth * chunks)
            chunk, offset = divmod(rest, depth)
            forwards.append((rank + chunk * depth, round_ * depth + offset))
        # A backward pass goes through the chunks from the last to the first.
        backwards = [(depth * (chunks - 1) + 2 * rank - stage, k) for stage, k in forwards]
        ahead = total if microbatches == depth else 2 * (depth - 1 - rank) + (chunks - 1) * depth
        ranks.append(tuple(_alternate(forwards, backwards, min(ahead, total))))
    placement = tuple((stage % depth,) for stage in range(depth * chunks))
    return Program("interleaved", placement, microbatches, tuple(ranks))


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


def asynchronous(
    name: str, stages: int, microbatches: int, *, begin: int = 0, taken: int | None = None, drain: bool = True
) -> Program:
    """The program of a pipeline that has taken in `begin` microbatches and takes in `taken` more (a step's).
    A filled pipeline repeats itself: a late step is an early one with higher numbers."""
    every = microbatches if name == "pipedream-2bw" else 1
    # Updates that can be left out of the computation: those beyond what fills the pipeline.
    skipped = max(0, begin // every - 2 * stages - 2)
    end = begin + (microbatches if taken is None else taken)
    taken_in = (begin - skipped * every, end - skipped * every)
    ranks = []
    for stage in range(stages):
        work = _work(stage, stages, every, taken_in, drain, _version_rule(name, stages, stage, every))
        ranks.append(tuple(_later(instruction, skipped * every, skipped) for instruction in work))
    return Program(name, tuple((stage,) for stage in range(stages)), end - begin, tuple(ranks))


def _work(
    stage: int,
    stages: int,
    every: int,
    taken_in: tuple[int, int],
    drain: bool,
    version_of: Callable[[int], int],
) -> Iterator[Instruction]:
    """A stage's instructions while the number of microbatches taken in rises from the first to the second."""
    ahead, end = stages - 1 - stage, taken_in[1]
    beyond = (stages + 1) * every  # what a later step may use decides what is stashed now
    first, last = (sum(1 for _ in _moves(ahead, number, every)) for number in taken_in)
    foreseen = _with_versions(stage, list(_moves(ahead, end + beyond, every)), version_of)
    if not drain:
        yield from (instruction for group in foreseen[first:last] for instruction in group)
        return
    groups = _with_versions(stage, list(_moves(ahead, end, every, drain=True)), version_of)
    # Earlier steps did not know that this one drains: free what they stashed in vain.
    for version in sorted(_stashed(foreseen[:first]) - _stashed(groups[:first])):
        yield Instruction(Op.POP, stage, version=version)
    yield from (instruction for group in groups[first:] for instruction in group)


def _later(instruction: Instruction, microbatches: int, versions: int) -> Instruction:
    """The same instruction after more microbatches and updates."""
    microbatch = None if instruction.microbatch is None else instruction.microbatch + microbatches
    version = None if instruction.version is None else instruction.version + versions
    return instruction._replace(microbatch=microbatch, version=version)


def _moves(ahead: int, taken_in: int, every: int, *, drain: bool = False) -> Iterator[Step]:
    """A stage's work on the first microbatches: `ahead` forwards, then in turn; an update after `every`."""
    yield from ((F, k) for k in range(min(ahead, taken_in)))
    for k in range(taken_in if drain else taken_in - ahead):
        if k + ahead < taken_in:
            yield F, k + ahead
        yield B, k
        if (k + 1) % every == 0:
            yield Op.UPDATE, k


def _version_rule(name: str, stages: int, stage: int, every: int) -> Callable[[int], int]:
    """Return the rule by which a microbatch chooses a version of a stage's weights."""
    rules: dict[str, Callable[[int], int]] = {
        "pipedream": lambda k: k - (stages - 1 - stage),
        "pipedream-vertical": lambda k: k - (stages - 1),
        "pipedream-2bw": lambda k: k // every - 1,
    }
    return lambda k: max(0, rules[name](k))


def _with_versions(
    stage: int, moves: Sequence[Step], version_of: Callable[[int], int]
) -> list[list[Instruction]]:
    """The instructions of each move. Weights that are used after an update are stashed before it, and popped
    after their last use."""
    last_use = {version_of(k): index for index, (op, k) in enumerate(moves) if op is not Op.UPDATE}
    newest = 0
    stashed: set[int] = set()
    groups: list[list[Instruction]] = []
    for index, (op, k) in enumerate(moves):
        if op is Op.UPDATE:
            stash = last_use.get(newest, -1) > index
            group = list(_update(stage, newest if stash else None))
            stashed |= {newest} if stash else set()
            newest += 1
        else:
            version = version_of(k)
            group = [Instruction(op, stage, k, version=version)]
            if last_use[version] == index and version in stashed:
                group.append(Instruction(Op.POP, stage, version=version))
        groups.append(group)
    return groups


def _update(stage: int, stash: int | None) -> Iterator[Instruction]:
    """An update of a stage, before which version `stash` is kept."""
    yield Instruction(Op.REDUCE, stage)
    yield Instruction(Op.NORM, stage)
    if stash is not None:
        yield Instruction(Op.STASH, stage, version=stash)
    yield Instruction(Op.UPDATE, stage)
    yield Instruction(Op.PUBLISH, stage)


def _stashed(groups: Sequence[list[Instruction]]) -> set[int]:
    """The versions that are still stashed at the end."""
    versions: set[int] = set()
    for instruction in (instruction for group in groups for instruction in group):
        if instruction.op is Op.STASH and instruction.version is not None:
            versions.add(instruction.version)
        elif instruction.op is Op.POP and instruction.version is not None:
            versions.discard(instruction.version)
    return versions
