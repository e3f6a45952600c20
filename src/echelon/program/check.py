"""The check of a program, before anything runs: all its errors at once, shown in a grid of ranks and time."""

from collections.abc import Collection, Mapping, Sequence

from echelon.errors import UserError
from echelon.program.grid import Grid, Line, draw, plain
from echelon.program.instruction import COMPUTE, Instruction, Program
from echelon.program.readiness import Position, walk
from echelon.program.rules import ProgramError, find
from echelon.program.rules.error import name
from echelon.program.rules.work import placed
from echelon.program.timeline import Span

_WIDTH, _MOST_BLOCKS, _MOST_RANKS = 100, 3, 16
_MOST_TOLD = 1000


def check(program: Program, *, training: bool = True, lines: Mapping[int, int] | None = None) -> None:
    """Raise one UserError with every error of a program, if there is any.

    `training=False`: forwards alone. `lines` says on which line of a file each rank stands.
    """
    errors = find(program, training=training)
    if not errors:
        return
    count = "1 error" if len(errors) == 1 else f"{len(errors)} errors"
    title = f"{count} in schedule '{program.name}', marked [ ] in the grid:"
    told = [_sentence(program, error, lines or {}) for error in errors[:_MOST_TOLD]]
    if len(errors) > _MOST_TOLD:
        told.append(f"and {len(errors) - _MOST_TOLD} more")
    raise UserError(f"{title}\n\n{picture(program, errors)}\n", told)


def _sentence(program: Program, error: ProgramError, lines: Mapping[int, int]) -> str:
    line = f"line {lines[error.rank]}, " if error.rank in lines else ""
    where = f"{line}rank {error.rank}"
    if error.place is None:
        return f"{where}: {error.reason}"
    return f"{where}, {name(program, error.rank, program.ranks[error.rank][error.place])}: {error.reason}"


def picture(program: Program, errors: Sequence[ProgramError]) -> str:
    """The grid with the places of the errors marked; of a large one, the parts with a mark."""
    marked = {(error.rank, error.place) for error in errors if error.place is not None}
    spans = _sketch(program, marked)
    marks = {span for place, span in spans.items() if place in marked}
    grid = draw(list(spans.values()), len(program.ranks), marks)
    return excerpt(grid, {error.rank for error in errors})


def excerpt(grid: Grid, ranks: Collection[int]) -> str:
    """The parts of a grid with a mark; where there are many ranks, these and their neighbours."""
    blocks = list(grid.blocks(_WIDTH))
    chosen = [block for block in blocks if _is_marked(block)][:_MOST_BLOCKS] or blocks[:1]
    near = {rank + step for rank in ranks for step in (-1, 0, 1)}
    texts = []
    for block in chosen:
        rows = list(enumerate(block[1:]))
        if len(rows) > _MOST_RANKS:
            rows = [(rank, row) for rank, row in rows if rank in near][:_MOST_RANKS]
        texts.append("\n".join([plain(block[0]), *(plain(row) for _, row in rows)]))
    return "\n\n".join(texts)


def _is_marked(block: tuple[Line, ...]) -> bool:
    return any(tick.marked for _, row in block for tick in row)


def _sketch(program: Program, marked: set[Position]) -> dict[Position, Span]:
    """A timeline of a invalid program: as far as it runs, one tick a computation; then the rest in order."""
    clock = [0] * len(program.ranks)
    ends: dict[Position, int] = {}
    spans: dict[Position, Span] = {}

    def put(rank: int, place: int) -> None:
        its: Instruction = program.ranks[rank][place]
        start = clock[rank]
        clock[rank] += its.op in COMPUTE or (rank, place) in marked
        ends[rank, place] = clock[rank]
        if clock[rank] > start:
            spans[rank, place] = Span(rank, start, clock[rank], its)

    if not any(placed(program)):
        for rank, place, causes in walk(program):
            clock[rank] = max([clock[rank], *(ends[cause] for cause in causes)])
            put(rank, place)
    for rank, instructions in enumerate(program.ranks):
        for place in range(len(instructions)):
            if (rank, place) not in ends:
                put(rank, place)
    return spans
