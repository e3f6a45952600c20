"""Rules of the weights: versions exist when they are used, gathers are paired, gradients come to an update.

F0 B0 F1 B1 REDUCE [TIE] NORM UPDATE PUBLISH
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from echelon.program.instruction import COMPUTE, Instruction, Op, Program
from echelon.program.rules import ProgramError

_GATHERING = frozenset({Op.GATHER, Op.FREE})

_Reason = tuple[int | None, str]  # the index of an instruction, and what is wrong with it


def _on_each_rank(
    program: Program, find: Callable[[Sequence[Instruction]], Iterable[_Reason]]
) -> Iterator[ProgramError]:
    for rank, instructions in enumerate(program.ranks):
        yield from (ProgramError(rank, index, reason) for index, reason in find(instructions))


def find_version_errors(program: Program) -> Iterator[ProgramError]:
    """A version exists when it is used, and a backward uses that of its forward."""
    return _on_each_rank(program, _versions_of)


def _versions_of(instructions: Sequence[Instruction]) -> Iterator[_Reason]:
    ops = [instruction.op for instruction in instructions]
    behind = ops[ops.index(Op.UPDATE) :] if Op.UPDATE in ops else []
    if COMPUTE.isdisjoint(behind) and all(instruction.version is None for instruction in instructions):
        return  # there is one version
    newest = 0
    stashed: set[tuple[int, int | None]] = set()  # stage and version
    used: dict[tuple[int, int | None], int] = {}  # by stage and microbatch
    for index, (op, stage, microbatch, _, given) in enumerate(instructions):
        slot = (stage, given)
        if op in COMPUTE:
            version = newest if given is None else given
            if version > newest:
                yield index, f"version {version} does not exist yet: the newest is version {newest}"
            elif version < newest and (stage, version) not in stashed:
                yield index, f"version {version} is gone: it was not stashed, or has been popped"
            first = used.setdefault((stage, microbatch), version)
            if first != version:
                yield index, f"uses version {version}, but its forward used version {first}"
        elif op is Op.STASH:
            if slot in stashed:
                yield index, f"cannot stash version {given}: it is stashed already"
            elif given != newest:
                yield index, f"cannot stash version {given}: the newest is version {newest}"
            stashed.add(slot)
        elif op is Op.POP:
            if slot not in stashed:
                yield index, f"version {given} is not stashed"
            stashed.discard(slot)
        elif op is Op.UPDATE:
            newest += 1
    for stage, given in sorted(stashed, key=str):
        yield None, f"version {given} of stage {stage} is stashed and never popped"


def find_gather_errors(program: Program) -> Iterator[ProgramError]:
    """In a program with any GATHER or FREE, they come in pairs around each use."""
    is_gathered = any(instruction.op in _GATHERING for work in program.ranks for instruction in work)
    return _on_each_rank(program, _gathers_of if is_gathered else lambda _: ())


def _gathers_of(instructions: Sequence[Instruction]) -> Iterator[_Reason]:
    gathered: dict[int, int] = {}  # by stage: where its GATHER stands
    for index, (op, stage, _, _, _) in enumerate(instructions):
        if op is Op.GATHER:
            if stage in gathered:
                yield index, f"the weights of stage {stage} are gathered already"
            gathered[stage] = index
        elif op is Op.FREE:
            if gathered.pop(stage, None) is None:
                yield index, f"the weights of stage {stage} are not gathered: nothing to free"
        elif op in COMPUTE and stage not in gathered:
            yield index, f"uses the weights of stage {stage}, which are not gathered"
    for stage, index in gathered.items():
        yield index, f"the weights of stage {stage} are gathered and never freed"


_FINAL = frozenset({Op.BACKWARD, Op.BACKWARD_WEIGHT})  # after which a weight has its gradient


@dataclass
class _Round:
    """The places of the instructions that lead to one UPDATE."""

    fresh: dict[int, int] = field(default_factory=dict)  # by stage: the last backward that is not reduced
    reduces: dict[int, int] = field(default_factory=dict)  # by stage: the last REDUCE
    ties: list[int] = field(default_factory=list)
    norms: list[int] = field(default_factory=list)

    def add(self, index: int, instruction: Instruction) -> None:
        if instruction.op is Op.REDUCE:
            self.fresh.pop(instruction.stage, None)
            self.reduces[instruction.stage] = index
        elif instruction.op is Op.TIE:
            self.ties.append(index)
        elif instruction.op is Op.NORM:
            self.norms.append(index)


def find_update_errors(program: Program) -> Iterator[ProgramError]:
    """Every gradient comes to an update, through REDUCE, TIE and NORM in this order, and is published."""
    return _on_each_rank(program, _updates_of)


def _updates_of(instructions: Sequence[Instruction]) -> Iterator[_Reason]:
    part = _Round()
    unpublished: int | None = None  # the UPDATE whose weights wait for a PUBLISH
    for index, instruction in enumerate(instructions):
        op = instruction.op
        if op in _FINAL:
            part.fresh[instruction.stage] = index
        if unpublished is not None and (op in COMPUTE or op is Op.UPDATE):
            yield (
                unpublished,
                "no PUBLISH between this and the next computation: replicas would use old weights",
            )
            unpublished = None
        if op is Op.UPDATE:
            yield from _of_round(part, index)
            part, unpublished = _Round(), index
        elif op is Op.PUBLISH:
            if unpublished is None:
                yield index, "no UPDATE before it: there are no new weights to publish"
            unpublished = None
        elif instruction.microbatch is None:
            part.add(index, instruction)
    for index in {**part.reduces, **part.fresh}.values():
        yield index, "no UPDATE behind it: its gradient would be lost"
    for index in (*part.ties, *part.norms):
        yield index, "no UPDATE behind it: nothing would use its result"
    if unpublished is not None:
        yield unpublished, "no PUBLISH behind it: replicas would keep the old weights"


def _of_round(part: _Round, update: int) -> Iterator[_Reason]:
    last_reduce = max(part.reduces.values(), default=-1)
    for stage, index in part.fresh.items():
        yield index, f"no REDUCE of stage {stage} between this and the UPDATE"
    if not part.norms:
        yield update, "no NORM before it: put one between the last REDUCE and the UPDATE"
    for index in part.norms[1:]:
        yield index, "a second NORM before one UPDATE: keep one"
    for index in part.norms[:1]:
        if index < last_reduce:
            yield index, "a REDUCE of the same UPDATE stands behind it: put NORM behind the last REDUCE"
    for index in part.ties:
        if index < last_reduce:
            yield index, "a REDUCE of the same UPDATE stands behind it: put TIE behind the last REDUCE"
        elif part.norms and index > part.norms[0]:
            yield index, "the NORM of the same UPDATE stands before it: put TIE between REDUCE and NORM"
