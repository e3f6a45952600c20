"""How replicas agree, and what they share: every rule refuses what it should, and names a fix that works."""

import pytest

from echelon.plan.state import Replicas
from tests.plan.examples import Examples, cases_of, check_rule, rules_of

EXAMPLES: Examples = {
    "`sync=async` with an asynchronous schedule": [
        ("data=2 sync=async schedule=pipedream", "use sync=all-reduce", "data=2 schedule=pipedream"),
    ],
    "`sync=async` with a pipeline": [
        (
            "data=2 sync=async pipeline=2",
            "sync=async pipeline=2: an asynchronous worker",
            "data=2 sync=async",
        ),
    ],
    "`sync=async` with `tensor` above 1": [
        ("data=2 sync=async tensor=2", "use sync=all-reduce, or tensor=1", "data=2 tensor=2"),
    ],
    "`sync=async` with `context` above 1": [
        ("data=2 sync=async context=2", "use sync=all-reduce, or context=1", "data=2 context=2"),
    ],
    "`sync=async` with `expert` above 1": [
        ("data=2 sync=async expert=2", "use sync=all-reduce, or expert=1", "data=2 expert=2"),
    ],
    "`staleness` without `sync=async`": [
        ("staleness=2", "add sync=async", "staleness=2 sync=async"),
        ("data=2 sync=parameter-server staleness=0", "drop staleness", "data=2 sync=parameter-server"),
    ],
    "`zero` above 0 with `sync=parameter-server` or `async`": [
        ("data=2 sync=async zero=1", "use zero=0", "data=2 sync=async"),
        ("data=2 sync=parameter-server zero=2", "or sync=all-reduce", "data=2 zero=2"),
        ("data=4 sync=async zero=1 shard=2", "use zero=0 without shard", "data=4 sync=async"),
    ],
    "`zero=3` with `pipeline=3-1`": [
        ("pipeline=2-1 zero=3", "use zero=2", "pipeline=2-1 zero=2"),
        ("pipeline=2-2 zero=3", "pipeline=2 data=N", "pipeline=2 data=2 zero=3"),
    ],
    "`zero=2` with `pipeline=3-1` and `schedule=naive` or a file": [
        ("pipeline=2-1 zero=2 schedule=naive", "use zero=1", "pipeline=2-1 zero=1 schedule=naive"),
        ("pipeline=2-1 zero=2 schedule=order.txt", "or schedule=1f1b", "pipeline=2-1 zero=2"),
    ],
    "`zero=3` with `schedule=zero-bubble`": [
        ("data=2 zero=3 schedule=zero-bubble", "use zero=2", "data=2 zero=2 schedule=zero-bubble"),
    ],
    "`zero=3` with an asynchronous schedule": [
        (
            "pipeline=2 data=2 zero=3 schedule=pipedream",
            "use zero=1",
            "pipeline=2 data=2 zero=1 schedule=pipedream",
        ),
        ("data=2 zero=3 schedule=pipedream-vertical", "or schedule=1f1b", "data=2 zero=3"),
    ],
    "`shard` with `zero=0`": [
        ("data=4 shard=2", "set zero=1 or more", "data=4 shard=2 zero=1"),
        ("data=4 shard=2 sync=async", "(with sync=all-reduce), or drop shard", "data=4 sync=async"),
    ],
    "`data` · `context` · replicas of a stage not divisible by `shard`, for any stage": [
        (
            "data=6 zero=3 shard=4",
            "stage 0 has 6 of them (replicas × data × context), not divisible by 4",
            "data=8 zero=3 shard=4",
        ),
        ("context=3 zero=1 shard=2", "set data to a multiple of 2", "data=2 context=3 zero=1 shard=2"),
        ("pipeline=4-2 zero=1 shard=4", "stage 1 has 2 of them", "pipeline=4-2 zero=1"),
    ],
}


@pytest.mark.parametrize("case", cases_of(Replicas, EXAMPLES))
def test_a_rule_refuses_its_examples_and_they_pass_without_it(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rule(rules_of(Replicas)[case], EXAMPLES[case], monkeypatch)
