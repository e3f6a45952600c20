"""One rule between the fields of a plan."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from echelon.plan.fields import FIELDS

if TYPE_CHECKING:
    from echelon.plan.plan import Plan


class Rule(NamedTuple):
    """A function that returns the error of a plan, or None, and the fields that it reads."""

    error: Callable[["Plan"], str | None]
    fields: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.error.__name__.removeprefix("_")


def show_stages(plan: "Plan") -> str:
    return FIELDS["pipeline"].show(plan.pipeline)
