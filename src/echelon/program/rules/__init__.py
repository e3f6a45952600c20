"""What can be wrong with a program: pure rules, each of which finds all errors of its kind."""

from collections.abc import Callable, Iterator

from echelon.program.instruction import Program
from echelon.program.rules.copies import find_copy_errors
from echelon.program.rules.error import ProgramError
from echelon.program.rules.transfers import find_deadlocks, find_unmatched_transfers
from echelon.program.rules.update import find_update_errors
from echelon.program.rules.weights import find_gather_errors, find_version_errors
from echelon.program.rules.work import (
    find_duplicates,
    find_misplaced,
    find_missing_backwards,
    find_missing_forwards,
    find_unmet_needs,
)

__all__ = ["ProgramError", "find_errors"]

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
