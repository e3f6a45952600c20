"""Rules of the update: gradients are summed, the norm is taken, the weights change and are published.

F0 B0 F1 B1 REDUCE [TIE] NORM UPDATE PUBLISH
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from echelon.program.instruction import COMPUTE, Instruction, Op, Program
from echelon.program.rules.error import ProgramError

_FINAL = frozenset({Op.BACKWARD, Op.BACKWARD_WEIGHT})  # after which a weight has its gradient

_Reason = tuple[int, str]  # where an instruction stands in the list of its rank, and what is wrong with it


@dataclass
class _Round:
    """Where the instructions that lead to one UPDATE stand."""

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
    for rank, instructions in enumerate(program.ranks):
        yield from (ProgramError(rank, index, reason) for index, reason in _reasons(instructions))


def _reasons(instructions: Sequence[Instruction]) -> Iterator[_Reason]:
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
    yield from _without_update(part)
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
    yield from _ties_of(part, last_reduce)


def _ties_of(part: _Round, last_reduce: int) -> Iterator[_Reason]:
    for index in part.ties:
        if index < last_reduce:
            yield index, "a REDUCE of the same UPDATE stands behind it: put TIE behind the last REDUCE"
        elif part.norms and index > part.norms[0]:
            yield index, "the NORM of the same UPDATE stands before it: put TIE between REDUCE and NORM"


def _without_update(part: _Round) -> Iterator[_Reason]:
    for index in {**part.reduces, **part.fresh}.values():
        yield index, "no UPDATE behind it: its gradient would be lost"
    for index in (*part.ties, *part.norms):
        yield index, "no UPDATE behind it: nothing would use its result"
