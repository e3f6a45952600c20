"""Schedules, microbatches and chunks: every rule refuses what it should, and names a fix that works."""

import pytest

from echelon.plan.axes import Schedule
from tests.plan.examples import Examples, cases_of, check_rule, rules_of

EXAMPLES: Examples = {
    "`schedule=interleaved`, `microbatches` not a multiple of the stages": [
        (
            "pipeline=2 schedule=interleaved chunks=2 microbatches=3",
            "set microbatches to a multiple of 2",
            "pipeline=2 schedule=interleaved chunks=2 microbatches=4",
        ),
    ],
    "`schedule=interleaved` with `pipeline=3-1`": [
        (
            "pipeline=2-1 schedule=interleaved chunks=2 microbatches=2",
            "every stage has the same ranks; use pipeline=2",
            "pipeline=2 schedule=interleaved chunks=2 microbatches=2",
        ),
    ],
    "`schedule=pipedream-2bw` with fewer microbatches than stages": [
        (
            "pipeline=4 schedule=pipedream-2bw microbatches=2",
            "set microbatches=4 or more",
            "pipeline=4 schedule=pipedream-2bw microbatches=4",
        ),
    ],
    "`schedule=pipedream`, `-vertical` or `-2bw` with `pipeline=3-1`": [
        (
            "pipeline=2-1 schedule=pipedream-vertical microbatches=2",
            "different weight versions; use schedule=1f1b",
            "pipeline=2-1 microbatches=2",
        ),
        ("pipeline=2-2 schedule=pipedream", "pipeline=2 data=N", "pipeline=2 data=2 schedule=pipedream"),
    ],
    "`chunks` above 1 without `schedule=interleaved`, or the reverse": [
        (
            "pipeline=2 chunks=2 microbatches=2",
            "use schedule=interleaved",
            "pipeline=2 chunks=2 microbatches=2 schedule=interleaved",
        ),
        (
            "pipeline=2 schedule=interleaved microbatches=2",
            "chunks=2 or more",
            "pipeline=2 schedule=interleaved microbatches=2 chunks=2",
        ),
    ],
    "`chunks` above 1 with `pipeline=1`": [
        (
            "chunks=2 schedule=interleaved",
            "set pipeline=2 or more",
            "chunks=2 schedule=interleaved pipeline=2 microbatches=2",
        ),
    ],
}


@pytest.mark.parametrize("case", cases_of(Schedule, EXAMPLES))
def test_a_rule_refuses_its_examples_and_they_pass_without_it(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rule(rules_of(Schedule)[case], EXAMPLES[case], monkeypatch)
