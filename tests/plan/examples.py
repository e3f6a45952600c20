"""Random plans, and the errors of a plan's text."""

import math

import pytest
from hypothesis import strategies as st

from echelon.errors import UserError
from echelon.plan import FIELDS, SCHEDULES, Plan


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
    },
)


def errors_of(text: str) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        Plan.parse(text)
    return caught.value.errors
