"""The check of a program, before anything runs: all rules and errors at once, in a grid of ranks and time.

The rules of work and messages are in rules.py. Those of weights are here: versions exist when they are used,
gathers are paired, and gradients come to an update: F0 B0 F1 B1 REDUCE [TIE] NORM UPDATE PUBLISH.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from echelon.errors import UserError
from echelon.program import rules
from echelon.program.instruction import COMPUTE, Instruction, Op, Program
from echelon.program.readiness import Position, walk
from echelon.program.rules import ProgramError
from echelon.program.simulate import Span
from echelon.program.text import Grid, draw, line_text
from echelon.quantities import counted

_GATHERING = frozenset({Op.GATHER, Op.FREE})

_Reason = tuple[int | None, str]  # the index of an instruction, and what is wrong with it


Rule = Callable[[Program], Iterator[ProgramError]]


def _on_each_rank(find: Callable[[Sequence[Instruction]], Iterable[_Reason]]) -> Rule:
    """Make a rule of a program of one that is about the instructions of a rank."""

    def rule(program: Program) -> Iterator[ProgramError]:
        for rank, instructions in enumerate(program.ranks):
            yield from (ProgramError(rank, index, reason) for index, reason in find(instructions))

    return rule


@_on_each_rank
def find_version_errors(instructions: Sequence[Instruction]) -> Iterator[_Reason]:
    """A version exists when it is used, and a backward uses that of its forward."""
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
    if any(instruction.op in _GATHERING for work in program.ranks for instruction in work):
        yield from _find_unpaired(program)


@_on_each_rank
def _find_unpaired(instructions: Sequence[Instruction]) -> Iterator[_Reason]:
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


@_on_each_rank
def find_update_errors(instructions: Sequence[Instruction]) -> Iterator[_Reason]:
    """Every gradient comes to an update, through REDUCE, TIE and NORM in this order, and is published."""
    part = _Round()
    unpublished: int | None = None  # the UPDATE whose weights wait for a PUBLISH
    for index, instruction in enumerate(instructions):
        op = instruction.op
        if op in _FINAL:
            part.fresh[instruction.stage] = index
        if unpublished is not None and (op in COMPUTE or op is Op.UPDATE):
            reason = "no PUBLISH between this and the next computation: replicas would use old weights"
            yield unpublished, reason
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


_WIDTH, _MOST_BLOCKS, _MOST_RANKS = 100, 3, 16
_MOST_REPORTED = 1000

_ALWAYS: tuple[Rule, ...] = (
    rules.find_duplicates,
    rules.find_missing_forwards,
    rules.find_unmet_needs,
    rules.find_unmatched_transfers,
    find_version_errors,
    find_gather_errors,
)
_TRAINING: tuple[Rule, ...] = (rules.find_missing_backwards, find_update_errors, rules.find_copy_errors)


def find_errors(program: Program, *, training: bool = True) -> list[ProgramError]:
    """Every error of a program. Without `training` it has only forwards, as for an evaluation.

    Misplaced instructions are reported alone, because the other rules assume that there are none. Deadlocks
    are reported if nothing else is wrong: a missing send would be reported twice.
    """
    misplaced = list(rules.find_misplaced(program))
    if misplaced:
        return misplaced
    every = [*_ALWAYS, *(_TRAINING if training else ())]
    return [error for rule in every for error in rule(program)] or list(rules.find_deadlocks(program))


def check(program: Program, *, training: bool = True, lines: Mapping[int, int] | None = None) -> None:
    """Raise one UserError with every error of a program, if it has any. `training=False`: it has only
    forwards. `lines` has the line of each rank, if the program is from a file."""
    errors = find_errors(program, training=training)
    if not errors:
        return
    title = f"{counted(len(errors), 'error')} in schedule '{program.name}', marked [ ] in the grid:"
    sentences = [error.sentence(program, lines or {}) for error in errors[:_MOST_REPORTED]]
    if len(errors) > _MOST_REPORTED:
        sentences.append(f"and {len(errors) - _MOST_REPORTED} more")
    raise UserError(f"{title}\n\n{picture(program, errors)}\n", sentences)


def picture(program: Program, errors: Sequence[ProgramError]) -> str:
    """The grid with the instructions of the errors marked; of a large one, the parts with a mark."""
    marked = {(error.rank, error.index) for error in errors if error.index is not None}
    spans = _sketch(program, marked)
    marks = {span for position, span in spans.items() if position in marked}
    grid = draw(list(spans.values()), len(program.ranks), marks)
    return excerpt(grid, {error.rank for error in errors})


def excerpt(grid: Grid, ranks: Collection[int]) -> str:
    """The parts of a grid with a mark; of many ranks, these and their neighbours."""
    blocks = list(grid.blocks(_WIDTH))
    marked = [block for block in blocks if any(tick.marked for _, row in block for tick in row)]
    chosen = marked[:_MOST_BLOCKS] or blocks[:1]
    neighbours = {rank + step for rank in ranks for step in (-1, 0, 1)}
    texts = []
    for block in chosen:
        rows = list(enumerate(block[1:]))
        if len(rows) > _MOST_RANKS:
            rows = [(rank, row) for rank, row in rows if rank in neighbours][:_MOST_RANKS]
        texts.append("\n".join([line_text(block[0]), *(line_text(row) for _, row in rows)]))
    return "\n\n".join(texts)


def _sketch(program: Program, marked: set[Position]) -> dict[Position, Span]:
    """A timeline of an invalid program: as far as it runs, one tick per computation; then the rest."""
    clock = [0] * len(program.ranks)
    ends: dict[Position, int] = {}
    spans: dict[Position, Span] = {}

    def put(rank: int, index: int) -> None:
        instruction = program.ranks[rank][index]
        start = clock[rank]
        clock[rank] += instruction.op in COMPUTE or (rank, index) in marked
        ends[rank, index] = clock[rank]
        if clock[rank] > start:
            spans[rank, index] = Span(rank, start, clock[rank], instruction)

    if not any(rules.find_misplaced(program)):
        for rank, index, causes in walk(program):
            clock[rank] = max([clock[rank], *(ends[cause] for cause in causes)])
            put(rank, index)
    for rank, instructions in enumerate(program.ranks):
        for index in range(len(instructions)):
            if (rank, index) not in ends:
                put(rank, index)
    return spans
