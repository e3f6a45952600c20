"""Ranks along the axes: every rule refuses what it should, and names a fix that works."""

import pytest

from echelon.plan.axes import Axes
from tests.plan.examples import Examples, cases_of, check_rule, rules_of

EXAMPLES: Examples = {
    "`pipeline=auto` with `schedule=interleaved` or a file": [
        (
            "pipeline=auto schedule=interleaved chunks=2",
            "give the stages",
            "pipeline=2 schedule=interleaved chunks=2 microbatches=2",
        ),
        ("pipeline=auto schedule=order.txt", "use another schedule", "pipeline=auto"),
    ],
    "`pipeline=auto`, `data` · `context` not divisible by `shard`": [
        (
            "pipeline=auto data=2 zero=1 shard=4",
            "data × context = 2 is not divisible by 4; set data to a multiple of 4",
            "pipeline=auto data=4 zero=1 shard=4",
        ),
        (
            "pipeline=auto data=3 zero=1 shard=2",
            "or give the stages, like pipeline=2-2",
            "pipeline=2-2 data=3 zero=1 shard=2",
        ),
        ("pipeline=auto data=3 zero=3 shard=2", "or drop shard", "pipeline=auto data=3 zero=3"),
    ],
    "`pipeline=auto` with `sync=async`": [
        ("pipeline=auto sync=async", "use pipeline=1", "pipeline=1 sync=async"),
    ],
    "`data` not divisible by `expert`": [
        ("expert=2", "1 is not divisible by 2", "data=2 expert=2"),
        ("data=3 expert=2", "set data to a multiple of 2", "data=4 expert=2"),
    ],
    "`expert` with stages of different replicas": [
        ("data=2 expert=2 pipeline=2-1", "pipeline=2 data=N", "data=2 expert=2 pipeline=2"),
        ("data=2 expert=2 pipeline=1-3", "or expert=1", "data=2 pipeline=1-3"),
    ],
    "`expert` with a `shard` that is no multiple of expert × context, and no part of it": [
        ("data=6 expert=2 zero=1 shard=3", "set shard to a multiple of 2", "data=6 expert=2 zero=1 shard=6"),
        (
            "data=2 expert=2 context=3 zero=3 shard=2",
            "(expert × context)",
            "data=2 expert=2 context=3 zero=3",
        ),
    ],
    "`attention=all-to-all` with `context=1`": [
        ("attention=all-to-all", "set context=2 or more", "context=2 attention=all-to-all"),
        ("data=2 attention=all-to-all", "or drop attention", "data=2"),
    ],
}


@pytest.mark.parametrize("case", cases_of(Axes, EXAMPLES))
def test_a_rule_refuses_its_examples_and_they_pass_without_it(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rule(rules_of(Axes)[case], EXAMPLES[case], monkeypatch)
