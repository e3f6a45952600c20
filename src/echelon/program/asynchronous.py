"""PipeDream: pipelines that never drain, where a microbatch's backward uses the weights of its forward.

With d stages, stage i is d−1−i forwards ahead of its backwards, for ever. Microbatch k meets, by schedule:

    pipedream             every update of stage i that came before its forward there: version k − (d−1−i)
    pipedream-vertical    what it met at stage 0, at every stage: version k − (d−1)
    pipedream-2bw         one update for each batch of m microbatches; batch t uses version t − 1: two suffice

(and version 0 until those exist). A training step takes in some microbatches and leaves what is on its way
for the next one; `drain` finishes it all. Numbers count from where the pipeline was last empty.
"""

from collections.abc import Callable, Iterator, Sequence

from echelon.program.instruction import Instruction, Op, Program

_FORWARD, _BACKWARD, _UPDATE = Op.FORWARD, Op.BACKWARD, Op.UPDATE

Move = tuple[Op, int]  # what to do, with which microbatch


def asynchronous(
    name: str, stages: int, microbatches: int, *, begin: int = 0, taken: int | None = None, drain: bool = True
) -> Program:
    """What a pipeline does that has taken in `begin` microbatches and takes in `taken` more (a step's).

    Once it has filled, a pipeline repeats itself: a late step is an early one with higher numbers.
    """
    every = microbatches if name == "pipedream-2bw" else 1
    updates = max(0, begin // every - 2 * stages - 2)  # so many before it, beyond those of a filled pipeline
    end = begin + (microbatches if taken is None else taken)
    ranks = []
    for stage in range(stages):
        earlier, later = begin - updates * every, end - updates * every
        work = _work(stage, stages, every, (earlier, later), drain, _version_rule(name, stages, stage, every))
        ranks.append(tuple(_moved_on(its, updates * every, updates) for its in work))
    return Program(name, tuple((stage,) for stage in range(stages)), end - begin, tuple(ranks))


def _work(
    stage: int,
    stages: int,
    every: int,
    taken_in: tuple[int, int],
    drain: bool,
    version_of: Callable[[int], int],
) -> Iterator[Instruction]:
    """A stage's instructions while what has been taken in rises from the first number to the second."""
    ahead, end = stages - 1 - stage, taken_in[1]
    beyond = (stages + 1) * every  # what a later step may use decides what is stashed now
    known, until = (sum(1 for _ in _moves(ahead, number, every)) for number in taken_in)
    foreseen = _with_versions(stage, list(_moves(ahead, end + beyond, every)), version_of)
    if not drain:
        yield from (its for group in foreseen[known:until] for its in group)
        return
    groups = _with_versions(stage, list(_moves(ahead, end, every, drain=True)), version_of)
    # Earlier steps could not know that this one drains: let go what they stashed in vain.
    for version in sorted(_stashed(foreseen[:known]) - _stashed(groups[:known])):
        yield Instruction(Op.POP, stage, version=version)
    yield from (its for group in groups[known:] for its in group)


def _moved_on(its: Instruction, microbatches: int, versions: int) -> Instruction:
    """The same instruction after more microbatches and updates."""
    microbatch = None if its.microbatch is None else its.microbatch + microbatches
    version = None if its.version is None else its.version + versions
    return its._replace(microbatch=microbatch, version=version)


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
    """Which version of a stage's weights a microbatch uses."""
    rules: dict[str, Callable[[int], int]] = {
        "pipedream": lambda k: k - (stages - 1 - stage),
        "pipedream-vertical": lambda k: k - (stages - 1),
        "pipedream-2bw": lambda k: k // every - 1,
    }
    return lambda k: max(0, rules[name](k))


def _with_versions(
    stage: int, moves: Sequence[Move], version_of: Callable[[int], int]
) -> list[list[Instruction]]:
    """For each move the instructions that do it: weights that are still needed are stashed before an update,
    and popped after their last use."""
    last_use = {version_of(k): place for place, (op, k) in enumerate(moves) if op is not _UPDATE}
    newest = 0
    stashed: set[int] = set()
    groups: list[list[Instruction]] = []
    for place, (op, k) in enumerate(moves):
        if op is _UPDATE:
            group = [Instruction(Op.REDUCE, stage), Instruction(Op.NORM, stage)]
            if last_use.get(newest, -1) > place:
                stashed.add(newest)
                group.append(Instruction(Op.STASH, stage, version=newest))
            group += [Instruction(_UPDATE, stage), Instruction(Op.PUBLISH, stage)]
            newest += 1
        else:
            version = version_of(k)
            group = [Instruction(op, stage, k, version=version)]
            if last_use[version] == place and version in stashed:
                group.append(Instruction(Op.POP, stage, version=version))
        groups.append(group)
    return groups


def _stashed(groups: Sequence[list[Instruction]]) -> set[int]:
    """The versions that are still stashed at the end."""
    versions: set[int] = set()
    for its in (its for group in groups for its in group):
        if its.op is Op.STASH and its.version is not None:
            versions.add(its.version)
        elif its.op is Op.POP and its.version is not None:
            versions.discard(its.version)
    return versions
