"""Rules of the weights: versions exist when they are used, and gathers are paired."""

from collections.abc import Iterator, Sequence

from echelon.program.instruction import COMPUTE, Instruction, Op, Program
from echelon.program.rules.error import ProgramError

_AROUND = frozenset({Op.GATHER, Op.FREE})


def versions(program: Program) -> Iterator[ProgramError]:
    """A version is there when it is used, and a backward uses that of its forward."""
    for rank, instructions in enumerate(program.ranks):
        if _has_one_version(instructions):
            continue
        newest, stashed = 0, set[tuple[int, int | None]]()
        used: dict[tuple[int, int | None], int] = {}
        for place, its in enumerate(instructions):
            key = (its.stage, its.version)
            if its.op in COMPUTE:
                version = newest if its.version is None else its.version
                if version != newest:
                    yield from _usable(rank, place, version, newest, key in stashed)
                first = used.setdefault((its.stage, its.microbatch), version)
                if first != version:
                    yield ProgramError(
                        rank, place, f"uses version {version}, but its forward used version {first}"
                    )
            elif its.op is Op.UPDATE:
                newest += 1
            elif its.op is Op.STASH:
                if its.version != newest or key in stashed:
                    what = (
                        "it is stashed already"
                        if key in stashed
                        else f"the weights of now are version {newest}"
                    )
                    yield ProgramError(rank, place, f"cannot stash version {its.version}: {what}")
                stashed.add(key)
            elif its.op is Op.POP:
                if key not in stashed:
                    yield ProgramError(rank, place, f"version {its.version} is not stashed")
                stashed.discard(key)
        for stage, left in sorted(stashed, key=str):
            yield ProgramError(rank, None, f"version {left} of stage {stage} is stashed and never popped")


def _has_one_version(instructions: Sequence[Instruction]) -> bool:
    """Whether no version is named, and all work is done before the first update."""
    ops = [its.op for its in instructions]
    behind = ops[ops.index(Op.UPDATE) :] if Op.UPDATE in ops else []
    return COMPUTE.isdisjoint(behind) and all(its.version is None for its in instructions)


def _usable(rank: int, place: int, version: int, newest: int, stashed: bool) -> Iterator[ProgramError]:
    if version > newest:
        yield ProgramError(
            rank, place, f"version {version} does not exist yet: the newest is version {newest}"
        )
    elif not stashed:
        yield ProgramError(rank, place, f"version {version} is gone: it was not stashed, or has been popped")


def gathered(program: Program) -> Iterator[ProgramError]:
    """GATHER and FREE come in pairs around each use, in a program that has any."""
    if not any(its.op in _AROUND for instructions in program.ranks for its in instructions):
        return
    for rank, instructions in enumerate(program.ranks):
        whole: dict[int, int] = {}
        for place, its in enumerate(instructions):
            if its.op is Op.GATHER:
                if its.stage in whole:
                    yield ProgramError(rank, place, f"the weights of stage {its.stage} are gathered already")
                whole[its.stage] = place
            elif its.op is Op.FREE:
                if whole.pop(its.stage, None) is None:
                    yield ProgramError(
                        rank, place, f"the weights of stage {its.stage} are not gathered: nothing to free"
                    )
            elif its.op in COMPUTE and its.stage not in whole:
                yield ProgramError(
                    rank, place, f"uses the weights of stage {its.stage}, which are not gathered"
                )
        for stage, place in whole.items():
            yield ProgramError(rank, place, f"the weights of stage {stage} are gathered and never freed")
