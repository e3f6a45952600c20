"""A schedule from a file: read, lowered as far as the file leaves to do, and checked."""

from pathlib import Path

from echelon.errors import UserError
from echelon.program.check import check, excerpt
from echelon.program.grid import draw_words
from echelon.program.instruction import RECEIVES, SENDS, Op, Program
from echelon.program.lower import add_reductions, add_transfers
from echelon.program.text import Parsed, parse


def load_schedule(path: str | Path) -> Program:
    """The whole program of a schedule file. Every error is told with its line.

    A file may give just the order of computation; or sends and receives too, and then all of them.
    """
    parsed = parse(_read(Path(path)), name=str(path))
    if parsed.program is None:
        raise UserError(_title(parsed, path), list(parsed.errors))
    program = complete(parsed.program)
    check(program, lines=parsed.lines)
    return program


def _title(parsed: Parsed, path: str | Path) -> str:
    """What is wrong with a text that is no program: with a grid of its words, where some cannot be read."""
    count = "1 error" if len(parsed.errors) == 1 else f"{len(parsed.errors)} errors"
    marked = [rank for rank, words in parsed.words.items() if any(invalid for _, invalid in words)]
    if not marked:
        return f"{count} in schedule '{path}':"
    grid = excerpt(draw_words(sorted(parsed.words.items())), marked)
    return f"{count} in schedule '{path}', marked [ ] in the grid:\n\n{grid}\n"


def complete(program: Program) -> Program:
    """Add reductions and updates, sends and receives: each kind where the program has none of it."""
    there = {its.op for instructions in program.ranks for its in instructions}
    if not there & {Op.REDUCE, Op.UPDATE}:
        program = add_reductions(program)
    return program if there & {*SENDS, *RECEIVES} else add_transfers(program)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"schedule '{path}' is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"schedule '{path}' cannot be read: {error.strerror or error}") from None
