"""The errors of a program as short sentences."""

from collections.abc import Callable, Iterator

from echelon.program import Program
from echelon.program.check import find_errors
from echelon.program.rules import ProgramError
from tests.program.cases import program_of

END = "REDUCE NORM UPDATE PUBLISH"


def reasons(
    text: str, rule: Callable[[Program], Iterator[ProgramError] | list[ProgramError]] = find_errors
) -> list[str]:
    """By `rule`, each with its rank and the index of the instruction."""
    sentences = []
    for error in rule(program_of(text)):
        at = "" if error.index is None else f" at {error.index}"
        sentences.append(f"rank {error.rank}{at}: {error.reason}")
    return sentences
