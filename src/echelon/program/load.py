"""A schedule from a file: read, completed with what the file leaves out, and checked."""

import errno
from pathlib import Path

from echelon.errors import UserError
from echelon.program.check import check, excerpt
from echelon.program.grid import draw_words
from echelon.program.instruction import RANK_LEVEL, RECEIVES, SENDS, Op, Program
from echelon.program.lower import add_transfers, add_update, fill_update
from echelon.program.text import Parsed, parse

MOST_CHARACTERS = 2**25


def read_text_file(path: Path) -> str:
    """All of it, as UTF-8. One without an end is an OSError, as others that cannot be read."""
    with path.open(encoding="utf-8") as file:
        text = file.read(MOST_CHARACTERS + 1)
    if len(text) > MOST_CHARACTERS:
        raise OSError(errno.EFBIG, f"it has more than {MOST_CHARACTERS} characters")
    return text


def load_schedule(path: str | Path, *, ties: bool = False) -> Program:
    """The whole program of a schedule file, checked. Every error names its line.

    What the file leaves out is added (`complete`). `ties`: several stages hold the same weights.
    """
    parsed = parse(_read(Path(path)), name=str(path))
    if parsed.program is None:
        raise UserError(_title(parsed, path), list(parsed.errors))
    program = complete(parsed.program, ties=ties)
    check(program, lines=parsed.lines)
    return program


def _title(parsed: Parsed, path: str | Path) -> str:
    """The title of the errors of a text, with a grid of its words if some cannot be read."""
    count = "1 error" if len(parsed.errors) == 1 else f"{len(parsed.errors)} errors"
    marked = [rank for rank, words in parsed.words.items() if any(invalid for _, invalid in words)]
    if not marked:
        return f"{count} in schedule '{path}':"
    grid = excerpt(draw_words(sorted(parsed.words.items())), marked)
    return f"{count} in schedule '{path}', marked [ ] in the grid:\n\n{grid}\n"


def complete(program: Program, *, ties: bool = False) -> Program:
    """Add what a program leaves out.

    A program without any instruction of an update gets all of them. One with some of them gets NORM, TIE
    (where `ties`) and PUBLISH, each if it has none of that kind. A program without any send or receive gets
    all of them.
    """
    ops = {instruction.op for instructions in program.ranks for instruction in instructions}
    if ops.isdisjoint(RANK_LEVEL | {Op.REDUCE}):
        program = add_update(program, ties=ties)
    else:
        wanted = {Op.NORM, Op.PUBLISH, *((Op.TIE,) if ties else ())}
        program = fill_update(program, wanted - ops)
    return add_transfers(program) if ops.isdisjoint(SENDS | RECEIVES) else program


def _read(path: Path) -> str:
    try:
        return read_text_file(path)
    except UnicodeDecodeError:
        raise UserError(f"schedule '{path}' is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"schedule '{path}' cannot be read: {error.strerror or error}") from None
