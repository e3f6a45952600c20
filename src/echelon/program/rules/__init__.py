"""What can be wrong with a program: pure rules, each finds all the errors of its kind."""

from collections.abc import Callable, Iterator

from echelon.program.instruction import Program
from echelon.program.rules.error import ProgramError
from echelon.program.rules.transfers import matched, never_stuck
from echelon.program.rules.update import updated
from echelon.program.rules.weights import gathered, versions
from echelon.program.rules.work import backwards, forwards, in_order, once, placed

__all__ = ["ProgramError", "find"]

Rule = Callable[[Program], Iterator[ProgramError]]

_ALWAYS: tuple[Rule, ...] = (once, forwards, in_order, matched, versions, gathered)
_TRAINING: tuple[Rule, ...] = (backwards, updated)


def find(program: Program, *, training: bool = True) -> list[ProgramError]:
    """Every error of a program. Without `training` it is forwards alone, as for an evaluation.

    An instruction that its rank cannot have is told alone: the other rules build on that. A deadlock is
    looked for when nothing else is wrong: a send that is missing would only be told twice.
    """
    misplaced = list(placed(program))
    if misplaced:
        return misplaced
    rules = [*_ALWAYS, *(_TRAINING if training else ())]
    return [error for rule in rules for error in rule(program)] or list(never_stuck(program))
