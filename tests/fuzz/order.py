"""A random schedule file: stages on random ranks, in any order in which nothing waits forever.

Each time, any piece of work whose inputs are ready is drawn, whichever rank it is on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

Choose = Callable[[Sequence[Any]], Any]
Placement = Sequence[Sequence[int]]  # for each stage the ranks that hold it


class Work(NamedTuple):
    """`op` of a microbatch at a stage."""

    op: str
    stage: int
    microbatch: int


def draw_order(choose: Choose, values: Mapping[str, Any]) -> str:
    """The lines of a file for a plan with these values, joined by " / "."""
    placement = _draw_placement(choose, values)
    backward_ops = choose(["B"] if values["zero"] == 3 or "parameters" in values["offload"] else ["B", "IW"])
    lines: list[list[str]] = [[] for _ in range(1 + max(max(holders) for holders in placement))]
    for op, stage, microbatch in _draw_work(choose, len(placement), values["microbatches"], backward_ops):
        holders = placement[stage]
        lines[holders[microbatch % len(holders)]].append(f"{op}{microbatch}@{stage}")
    stages = [f"stage {stage}: {' '.join(map(str, holders))}" for stage, holders in enumerate(placement)]
    ranks = [f"rank {rank}: {' '.join(words)}" for rank, words in enumerate(lines)]
    return " / ".join([*stages, *ranks])


def _draw_placement(choose: Choose, values: Mapping[str, Any]) -> Placement:
    """Stage s on rank s, and as many more stages as layers allow on any rank; or replicas, in order."""
    pipeline, tied = values["pipeline"], values["tied"]
    if isinstance(pipeline, tuple):
        edges = [sum(pipeline[:stage]) for stage in range(len(pipeline) + 1)]
        return [range(begin, end) for begin, end in pairwise(edges)]
    most = pipeline if tied and pipeline == 1 else min(values["layers"] + 2, pipeline + 3)
    stages = choose(range(pipeline, most + 1))
    ranks = list(range(pipeline))
    while len(ranks) < stages:
        # A tied weight is in the first and the last stage, which must be on different ranks.
        apart = tied and len(ranks) == stages - 1
        ranks.append(choose(range(1 if apart else 0, pipeline)))
    backwards = choose([False, True])
    return [[pipeline - 1 - rank if backwards else rank] for rank in ranks]


def _draw_work(choose: Choose, stages: int, microbatches: int, backward_ops: str) -> Iterator[Work]:
    """All work of a step. `backward_ops` is how a backward is written: "B", or "IW" in two parts."""
    remaining = [
        Work(op, s, k) for op in f"{backward_ops}F" for k in range(microbatches) for s in range(stages)
    ]
    done: set[Work] = set()
    while remaining:
        work = choose([work for work in remaining if done.issuperset(_needs(work, stages, backward_ops))])
        remaining.remove(work)
        done.add(work)
        yield work


def _needs(work: Work, stages: int, backward_ops: str) -> Iterator[Work]:
    """What must be done before."""
    op, stage, microbatch = work
    if op == "F" and stage > 0:
        yield Work("F", stage - 1, microbatch)
    elif op == "W":
        yield Work("I", stage, microbatch)
    elif op != "F":
        yield Work("F", stage, microbatch)
        if stage < stages - 1:
            yield Work(backward_ops[0], stage + 1, microbatch)
