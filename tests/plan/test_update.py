"""When and where weights are updated: every rule refuses what it should, and names a fix that works."""

import pytest

from echelon.plan.state import Update
from tests.plan.examples import Examples, cases_of, check_rule, rules_of

EXAMPLES: Examples = {
    "`update=backward` with several microbatches": [
        ("update=backward microbatches=2", "or update=last-backward", "update=last-backward microbatches=2"),
    ],
    "`update=backward` or `last-backward` with an asynchronous schedule": [
        (
            "pipeline=2 schedule=pipedream update=backward",
            "or schedule=1f1b",
            "pipeline=2 schedule=1f1b update=backward",
        ),
    ],
    "`update=backward` or `last-backward` with `sync=parameter-server` or `async`": [
        ("data=2 sync=async update=backward", "or sync=all-reduce", "data=2 update=backward"),
    ],
    "`update=backward` or `last-backward` with `precision=fp16`": [
        ("precision=fp16 update=backward", "use precision=bf16", "precision=bf16 update=backward"),
    ],
    "`masters=false` with a precision other than `bf16` and `fp8`": [
        ("masters=false", "use precision=bf16", "masters=false precision=bf16"),
        ("masters=false precision=fp16", "or drop masters", "precision=fp16"),
    ],
    "`masters=false` with `sync=parameter-server` or `async`": [
        (
            "data=2 masters=false precision=bf16 sync=async",
            "use sync=all-reduce",
            "data=2 masters=false precision=bf16",
        ),
    ],
    "`offload=parameters` with an asynchronous schedule": [
        (
            "pipeline=2 offload=parameters schedule=pipedream",
            "use schedule=1f1b",
            "pipeline=2 offload=parameters",
        ),
        (
            "pipeline=2 offload=parameters,activations schedule=pipedream",
            "or drop offload",
            "pipeline=2 offload=activations schedule=pipedream",
        ),
    ],
    "`offload=parameters` with `schedule=zero-bubble`": [
        (
            "pipeline=2 offload=parameters schedule=zero-bubble",
            "use schedule=1f1b",
            "pipeline=2 offload=parameters",
        ),
    ],
    "`offload=parameters` with `sync=parameter-server` or `async`": [
        (
            "data=2 offload=parameters sync=parameter-server",
            "use sync=all-reduce",
            "data=2 offload=parameters",
        ),
        ("data=2 offload=parameters sync=async", "or drop offload", "data=2 sync=async"),
    ],
    "`offload=optimizer` with an asynchronous schedule": [
        (
            "pipeline=2 offload=optimizer schedule=pipedream",
            "use schedule=1f1b",
            "pipeline=2 offload=optimizer",
        ),
        (
            "pipeline=2 delay=1 offload=optimizer schedule=pipedream",
            "or drop offload=optimizer",
            "pipeline=2 schedule=pipedream",
        ),
    ],
    "`offload=optimizer` with `sync=parameter-server` or `async`": [
        ("data=2 sync=async offload=optimizer", "use sync=all-reduce", "data=2 offload=optimizer"),
        (
            "data=2 sync=parameter-server offload=optimizer",
            "or drop offload=optimizer",
            "data=2 sync=parameter-server",
        ),
    ],
    "`delay=1` without `offload=optimizer`": [
        ("delay=1", "add offload=optimizer", "delay=1 offload=optimizer"),
        ("delay=1 offload=activations", "or drop delay", "offload=activations"),
    ],
    "`delay=1` with `update=backward` or `last-backward`": [
        (
            "delay=1 offload=optimizer update=backward",
            "use update=step",
            "delay=1 offload=optimizer",
        ),
    ],
}


@pytest.mark.parametrize("case", cases_of(Update, EXAMPLES))
def test_a_rule_refuses_its_examples_and_they_pass_without_it(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rule(rules_of(Update)[case], EXAMPLES[case], monkeypatch)
