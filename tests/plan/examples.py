"""Random plans, and the errors of a plan's text."""

import math

import pytest
from hypothesis import strategies as st

from echelon.errors import UserError
from echelon.plan import Plan
from echelon.plan.fields import (
    ATTENTIONS,
    CHECKPOINTS,
    COMPRESSIONS,
    GRADIENTS,
    OFFLOADS,
    PRECISIONS,
    RECOMPUTES,
    SCHEDULES,
    SYNCS,
    UPDATES,
)

degree = st.integers(1, 8)
plan_values = st.fixed_dictionaries(
    {},
    optional={
        "data": degree,
        "tensor": degree,
        "pipeline": degree | st.lists(degree, min_size=1, max_size=4).map(tuple),
        "expert": degree,
        "context": degree,
        "attention": st.sampled_from(ATTENTIONS),
        "sync": st.sampled_from(SYNCS),
        "staleness": st.integers(0, 9) | st.just(math.inf),
        "zero": st.integers(0, 3),
        "shard": st.integers(0, 6),
        "schedule": st.sampled_from([*SCHEDULES, "plans/mine.txt", "a b.txt"]),
        "microbatches": degree,
        "chunks": degree,
        "sequence": st.booleans(),
        "compile": st.booleans(),
        "precision": st.sampled_from(PRECISIONS),
        "gradients": st.sampled_from(GRADIENTS),
        "recompute": st.sampled_from([*RECOMPUTES, "budget:1024"]),
        "checkpoints": st.sampled_from(CHECKPOINTS),
        "contiguous": st.booleans(),
        "update": st.sampled_from(UPDATES),
        "masters": st.booleans(),
        "offload": st.lists(st.sampled_from(OFFLOADS), unique=True).map(tuple),
        "delay": st.integers(0, 1),
        "compress": st.sampled_from(COMPRESSIONS),
        "debug": st.booleans(),
    },
)


def errors_of(text: str) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        Plan.parse(text)
    return caught.value.errors
