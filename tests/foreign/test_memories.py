"""What user code keeps in Python is what it is without an engine: audits leave no trace in it."""

from typing import Any

import pytest

from echelon.plan import Plan
from tests.foreign.memories import MEMORIES, train_memory
from tests.foreign.proof import judge

PLANS = [
    "data=1",
    "update=backward",
    "data=2",
    "data=2 zero=3",
    "microbatches=2",
    "pipeline=2 microbatches=2",
    "microbatches=4 recompute=full",
]
ALWAYS = [(name, "data=1") for name in MEMORIES] + [
    ("loss with a running mean", "data=2"),
    ("follows in its forward", "update=backward"),
    ("branches by a count", "data=2 zero=3"),
    ("branches by a count", "microbatches=2"),
    ("branches by a number", "data=2"),
    ("branches by a number", "microbatches=4 recompute=full"),
    ("a mean for evaluation", "microbatches=2"),
    ("counts in attributes", "microbatches=4 recompute=full"),
    ("counts in attributes", "pipeline=2 microbatches=2"),
]

# Each replica, and each microbatch, calls the loss by itself: where the number of calls is all that counts,
# replicas agree with one device. Attributes of modules count one call for all microbatches.
EQUAL = {(name, plan) for name in MEMORIES for plan in PLANS[:2]} | {
    (name, plan) for name in MEMORIES if name.startswith(("counts", "loss that")) for plan in PLANS[2:4]
}
EQUAL |= {("counts in attributes", plan) for plan in PLANS}


def check(name: str, plan: str, warm_ranks: Any) -> None:
    refusal = judge(MEMORIES[name], warm_ranks(Plan.parse(plan).ranks).run(train_memory, name, plan))
    assert (refusal is None) == ((name, plan) in EQUAL), refusal
    assert refusal is None or any(
        w in refusal
        for w in (
            "not train as on one device",
            "leave something else than one device in a buffer (mean)",
            "lists no layers",
            "changed in place",
            "in place, from",
        )
    )


@pytest.mark.parametrize(("name", "plan"), ALWAYS)
def test_some_are_equal_or_refused(name: str, plan: str, warm_ranks: Any) -> None:
    check(name, plan, warm_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), [(name, plan) for name in MEMORIES for plan in PLANS])
def test_all_are_equal_or_refused(name: str, plan: str, warm_ranks: Any) -> None:
    check(name, plan, warm_ranks)
