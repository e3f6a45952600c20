"""PipeDream: pipelines that never drain, where a microbatch's backward uses the weights of its forward.

With d stages, stage i is d−1−i forwards ahead of its backwards, for ever. Microbatch k then meets, by schedule:

    pipedream             every update of stage i that came before its forward there: version k − (d−1−i)
    pipedream-vertical    what it met at stage 0, at every stage: version k − (d−1)
    pipedream-2bw         one update for each batch of m microbatches; batch t uses version t − 1: two suffice

(and version 0 until those exist). A training step takes in some microbatches and leaves what is on its way
for the next one; `drain` finishes it all. Numbers count from where the pipeline was last empty.
"""

from collections.abc import Callable, Iterator, Sequence

from echelon.program.instruction import Instruction, Op, Program

ASYNCHRONOUS = ("pipedream", "pipedream-vertical", "pipedream-2bw")

_FORWARD, _BACKWARD, _UPDATE = Op.FORWARD, Op.BACKWARD, Op.UPDATE

Move = tuple[Op, int]  # what to do, with which microbatch


def asynchronous(
    name: str, stages: int, microbatches: int, *, begin: int = 0, taken: int | None = None, drain: bool = True
) -> Program:
    """What a pipeline does that has taken in `begin` microbatches and takes in `taken` more (a step's)."""
    every = microbatches if name == "pipedream-2bw" else 1
    end = begin + (microbatches if taken is None else taken)
    beyond = 0 if drain else (stages + 1) * every  # what a later step will use decides what is stashed now
    ranks = []
    for stage in range(stages):
        ahead = stages - 1 - stage
        moves = list(_moves(ahead, end + beyond, every, drain=drain))
        known, until = (sum(1 for _ in _moves(ahead, taken_in, every)) for taken_in in (begin, end))
        groups = _with_versions(stage, moves, _version_rule(name, stages, ahead, every))
        chosen = groups[known:] if drain else groups[known:until]
        ranks.append(tuple(instruction for group in chosen for instruction in group))
    return Program(name, tuple((stage,) for stage in range(stages)), end - begin, tuple(ranks))


def _moves(ahead: int, taken_in: int, every: int, *, drain: bool = False) -> Iterator[Move]:
    """A stage's work on the first microbatches: `ahead` forwards, then in turn; an update after `every`."""
    yield from ((_FORWARD, k) for k in range(min(ahead, taken_in)))
    for k in range(taken_in if drain else taken_in - ahead):
        if k + ahead < taken_in:
            yield _FORWARD, k + ahead
        yield _BACKWARD, k
        if (k + 1) % every == 0:
            yield _UPDATE, k


def _version_rule(name: str, stages: int, ahead: int, every: int) -> Callable[[int], int]:
    """Which version of a stage's weights a microbatch uses."""
    rules: dict[str, Callable[[int], int]] = {
        "pipedream": lambda k: k - ahead,
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
            group = [Instruction(Op.REDUCE, stage), Instruction(_UPDATE, stage)]
            if last_use.get(newest, -1) > place:
                stashed.add(newest)
                group.insert(1, Instruction(Op.STASH, stage, version=newest))
            newest += 1
        else:
            version = version_of(k)
            group = [Instruction(op, stage, k, version=version)]
            if last_use[version] == place and version in stashed:
                group.append(Instruction(Op.POP, stage, version=version))
        groups.append(group)
    return groups
