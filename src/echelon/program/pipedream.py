"""PipeDream: pipelines that never drain, where a microbatch's backward uses the weights of its forward.

With d stages, stage i is d−1−i forwards ahead of its backwards, forever. Microbatch k uses, by schedule:

    pipedream             every update of stage i that came before its forward there: version k − (d−1−i)
    pipedream-vertical    at every stage the version that it used at stage 0: version k − (d−1)
    pipedream-2bw         one update for each batch of m microbatches; batch t uses version t − 1: two suffice

(and version 0 until those exist). A training step takes in some microbatches and leaves those in flight to
the next step; `drain` finishes them all. Numbers count from where the pipeline was last empty.
"""

from collections.abc import Callable, Iterator, Sequence

from echelon.program.instruction import Instruction, Op, Program

_FORWARD, _BACKWARD, _UPDATE = Op.FORWARD, Op.BACKWARD, Op.UPDATE

Move = tuple[Op, int]  # an operation, and the microbatch that it is for


def asynchronous(
    name: str, stages: int, microbatches: int, *, begin: int = 0, taken: int | None = None, drain: bool = True
) -> Program:
    """The program of a pipeline that has taken in `begin` microbatches and takes in `taken` more (a step's).

    A filled pipeline repeats itself: a late step is an early one with higher numbers.
    """
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


def _moves(ahead: int, taken_in: int, every: int, *, drain: bool = False) -> Iterator[Move]:
    """A stage's work on the first microbatches: `ahead` forwards, then in turn; an update after `every`."""
    yield from ((_FORWARD, k) for k in range(min(ahead, taken_in)))
    for k in range(taken_in if drain else taken_in - ahead):
        if k + ahead < taken_in:
            yield _FORWARD, k + ahead
        yield _BACKWARD, k
        if (k + 1) % every == 0:
            yield _UPDATE, k


def _version_rule(name: str, stages: int, stage: int, every: int) -> Callable[[int], int]:
    """Return the rule by which a microbatch chooses a version of a stage's weights."""
    rules: dict[str, Callable[[int], int]] = {
        "pipedream": lambda k: k - (stages - 1 - stage),
        "pipedream-vertical": lambda k: k - (stages - 1),
        "pipedream-2bw": lambda k: k // every - 1,
    }
    return lambda k: max(0, rules[name](k))


def _with_versions(
    stage: int, moves: Sequence[Move], version_of: Callable[[int], int]
) -> list[list[Instruction]]:
    """The instructions of each move.

    Weights that are used after an update are stashed before it, and popped after their last use.
    """
    last_use = {version_of(k): index for index, (op, k) in enumerate(moves) if op is not _UPDATE}
    newest = 0
    stashed: set[int] = set()
    groups: list[list[Instruction]] = []
    for index, (op, k) in enumerate(moves):
        if op is _UPDATE:
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
