"""Rules between the fields of a plan: which combinations are invalid, and why.

A rule is checked once each of its fields is valid on its own. A valid combination that is not implemented yet
is refused by the engine, not here. The rules of each subject are in files of their own.
"""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from echelon.plan.async_rules import ASYNC_RULES
from echelon.plan.auto_rules import AUTO_RULES
from echelon.plan.axis_rules import AXIS_RULES
from echelon.plan.fields import AUTO
from echelon.plan.memory_rules import MEMORY_RULES
from echelon.plan.rule import Rule
from echelon.plan.schedule_rules import SCHEDULE_RULES
from echelon.plan.update_rules import UPDATE_RULES

if TYPE_CHECKING:
    from echelon.plan.plan import Plan

RULES: tuple[Rule, ...] = (*AXIS_RULES, *SCHEDULE_RULES, *ASYNC_RULES, *MEMORY_RULES, *UPDATE_RULES)


def broken_rules(plan: "Plan", invalid: Collection[str] = ()) -> Iterator[str]:
    """The error of every rule that `plan` breaks. A rule that reads an `invalid` field is skipped."""
    rules = RULES
    if plan.pipeline == AUTO:
        rules = (*(rule for rule in RULES if "pipeline" not in rule.fields), *AUTO_RULES)
    for rule in rules:
        error = rule.error(plan) if not set(rule.fields) & set(invalid) else None
        if error is not None:
            yield error
