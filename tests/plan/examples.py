"""Random plans, and the errors of a plan's text."""

import dataclasses
import math

import pytest
from hypothesis import strategies as st

from echelon.errors import UserError
from echelon.plan import FIELDS, SCHEDULES, Plan, plan
from echelon.plan.field import Rule


def sampled(field: str) -> st.SearchStrategy[str]:
    return st.sampled_from(FIELDS[field].options)


degree = st.integers(1, 8)
plan_values = st.fixed_dictionaries(
    {},
    optional={
        "data": degree,
        "tensor": degree,
        "pipeline": degree | st.lists(degree, min_size=1, max_size=4).map(tuple),
        "expert": degree,
        "context": degree,
        "attention": sampled("attention"),
        "sync": sampled("sync"),
        "staleness": st.integers(0, 9) | st.just(math.inf),
        "zero": st.integers(0, 3),
        "shard": st.integers(0, 6),
        "schedule": st.sampled_from([*SCHEDULES, "plans/mine.txt", "a b.txt"]),
        "microbatches": degree,
        "chunks": degree,
        "sequence": st.booleans(),
        "compile": st.booleans(),
        "precision": sampled("precision"),
        "gradients": sampled("gradients"),
        "recompute": sampled("recompute") | st.just("budget:1024"),
        "checkpoints": sampled("checkpoints"),
        "contiguous": st.booleans(),
        "update": sampled("update"),
        "masters": st.booleans(),
        "offload": st.lists(sampled("offload"), unique=True).map(tuple),
        "delay": st.integers(0, 1),
        "compress": sampled("compress"),
        "debug": st.booleans(),
        "graphs": sampled("graphs"),
    },
)


def errors_of(text: str) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        Plan.parse(text)
    return caught.value.errors


# By rule: plans that break this rule alone, words of the error, and the plan after the fix that it names.
Examples = dict[str, list[tuple[str, str, str]]]


def rules_of(fields: type) -> dict[str, Rule]:
    """The rules of each field of a plan's base class, by case."""
    rules = [rule for field in dataclasses.fields(fields) for rule in field.metadata["field"].rules]
    return {rule.case: rule for rule in rules}


def cases_of(fields: type, examples: Examples) -> list[str]:
    """Those of all rules, and of all examples: a rule that is gone is missed."""
    return list(rules_of(fields) | examples)


def check_rule(rule: Rule, examples: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule refuses its examples, its fixes work, and without it no other rule refuses them."""
    assert examples
    for refused, words, fixed in examples:
        (error,) = errors_of(refused)
        assert words in error
        assert isinstance(Plan.parse(fixed), Plan), "the fix that the message names"
    monkeypatch.setattr(plan, "RULES", tuple(other for other in plan.RULES if other != rule))
    for refused, _, _ in examples:
        assert isinstance(Plan.parse(refused), Plan), "no other rule refuses it"
