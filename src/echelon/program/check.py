"""The check of a program, before anything runs: all rules and errors at once, in a grid of ranks and time."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from echelon.errors import UserError
from echelon.program.grid import Grid, draw, line_text
from echelon.program.instruction import COMPUTE, Program
from echelon.program.readiness import Position, walk
from echelon.program.rules import (
    ProgramError,
    find_copy_errors,
    find_deadlocks,
    find_duplicates,
    find_misplaced,
    find_missing_backwards,
    find_missing_forwards,
    find_unmatched_transfers,
    find_unmet_needs,
)
from echelon.program.timeline import Span
from echelon.program.weight_rules import find_gather_errors, find_update_errors, find_version_errors

_WIDTH, _MOST_BLOCKS, _MOST_RANKS = 100, 3, 16
_MOST_REPORTED = 1000

Rule = Callable[[Program], Iterator[ProgramError]]

_ALWAYS: tuple[Rule, ...] = (
    find_duplicates,
    find_missing_forwards,
    find_unmet_needs,
    find_unmatched_transfers,
    find_version_errors,
    find_gather_errors,
)
_TRAINING: tuple[Rule, ...] = (find_missing_backwards, find_update_errors, find_copy_errors)


def find_errors(program: Program, *, training: bool = True) -> list[ProgramError]:
    """Every error of a program. Without `training` it has only forwards, as for an evaluation.

    Misplaced instructions are reported alone, because the other rules assume that there are none. Deadlocks
    are reported if nothing else is wrong: a missing send would be reported twice.
    """
    misplaced = list(find_misplaced(program))
    if misplaced:
        return misplaced
    rules = [*_ALWAYS, *(_TRAINING if training else ())]
    return [error for rule in rules for error in rule(program)] or list(find_deadlocks(program))


def check(program: Program, *, training: bool = True, lines: Mapping[int, int] | None = None) -> None:
    """Raise one UserError with every error of a program, if it has any.

    `training=False`: it has only forwards. `lines` has the line of each rank, if the program is from a file.
    """
    errors = find_errors(program, training=training)
    if not errors:
        return
    count = "1 error" if len(errors) == 1 else f"{len(errors)} errors"
    title = f"{count} in schedule '{program.name}', marked [ ] in the grid:"
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

    if not any(find_misplaced(program)):
        for rank, index, causes in walk(program):
            clock[rank] = max([clock[rank], *(ends[cause] for cause in causes)])
            put(rank, index)
    for rank, instructions in enumerate(program.ranks):
        for index in range(len(instructions)):
            if (rank, index) not in ends:
                put(rank, index)
    return spans
