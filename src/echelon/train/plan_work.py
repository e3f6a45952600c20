"""Numbers in the text of a plan that nobody can mean: digits of other scripts, and far too many of them."""

import re

from echelon.plan import AUTO, Plan

_COUNTS = ("data", "tensor", "pipeline", "expert", "context", "shard", "microbatches", "chunks")
_TOO_LARGE = 10**6
MOST_WORK = 10**6  # forwards of a pipeline's step


def text_errors(plan: str) -> list[str]:
    """The errors of a plan's words that show before they are read."""
    return [error for word in plan.split() if (error := _word_error(word)) is not None]


def work_error(plan: Plan) -> str | None:
    """An error if a step of the pipeline has so many forwards that its program cannot be made."""
    if plan.pipeline == AUTO or plan.stages == 1:
        return None
    forwards = plan.stages * plan.chunks * plan.microbatches
    if forwards <= MOST_WORK:
        return None
    return (
        f"plan '{plan}': a step has {forwards:,} forwards (stages × chunks × microbatches), and at most "
        f"{MOST_WORK:,} can be scheduled; use fewer microbatches"
    )


def _word_error(word: str) -> str | None:
    if any(character.isdecimal() and not character.isascii() for character in word):
        return f"{word}: numbers must be written with the digits 0 to 9"
    field, _, text = word.partition("=")
    numbers = re.findall(r"\d+", text) if field in _COUNTS else []
    if any(len(number.lstrip("0")) > len(str(_TOO_LARGE - 1)) for number in numbers):
        return f"{word}: must be below {_TOO_LARGE:,}"
    return None
