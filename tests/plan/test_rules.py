"""Every rule refuses what it should, names a fix that works, and is missed when it is gone."""

import re

import pytest
from hypothesis import given

from echelon.plan import ASYNCHRONOUS_SCHEDULES, SCHEDULES, Plan, plan
from echelon.plan.field import Rule
from echelon.plan.plan import RULES, draft
from tests.plan.examples import errors_of, plan_values

# By rule: a plan that breaks this rule alone, words of the error, and the plan after the fix that it names.
EXAMPLES: dict[str, list[tuple[str, str, str]]] = {
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
    "`staleness` without `sync=async`": [
        ("staleness=2", "add sync=async", "staleness=2 sync=async"),
        ("data=2 sync=parameter-server staleness=0", "drop staleness", "data=2 sync=parameter-server"),
    ],
    "`zero` above 0 with `sync=parameter-server` or `async`": [
        ("data=2 sync=async zero=1", "use zero=0", "data=2 sync=async"),
        ("data=2 sync=parameter-server zero=2", "or sync=all-reduce", "data=2 zero=2"),
        ("data=4 sync=async zero=1 shard=2", "use zero=0 without shard", "data=4 sync=async"),
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
    "`zero=3` with an asynchronous schedule": [
        (
            "pipeline=2 data=2 zero=3 schedule=pipedream",
            "use zero=1",
            "pipeline=2 data=2 zero=1 schedule=pipedream",
        ),
        ("data=2 zero=3 schedule=pipedream-vertical", "or schedule=1f1b", "data=2 zero=3"),
    ],
    "`schedule=pipedream`, `-vertical` or `-2bw` with `pipeline=3-1`": [
        (
            "pipeline=2-1 schedule=pipedream-vertical microbatches=2",
            "different weight versions; use schedule=1f1b",
            "pipeline=2-1 microbatches=2",
        ),
        ("pipeline=2-2 schedule=pipedream", "pipeline=2 data=N", "pipeline=2 data=2 schedule=pipedream"),
    ],
    "`zero=3` with `pipeline=3-1`": [
        ("pipeline=2-1 zero=3", "use zero=2", "pipeline=2-1 zero=2"),
        ("pipeline=2-2 zero=3", "pipeline=2 data=N", "pipeline=2 data=2 zero=3"),
    ],
    "`zero=3` with `schedule=zero-bubble`": [
        ("data=2 zero=3 schedule=zero-bubble", "use zero=2", "data=2 zero=2 schedule=zero-bubble"),
    ],
    "`zero=2` with `pipeline=3-1` and `schedule=naive` or a file": [
        ("pipeline=2-1 zero=2 schedule=naive", "use zero=1", "pipeline=2-1 zero=1 schedule=naive"),
        ("pipeline=2-1 zero=2 schedule=order.txt", "or schedule=1f1b", "pipeline=2-1 zero=2"),
    ],
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
    "`chunks` above 1 with `pipeline=1`": [
        (
            "chunks=2 schedule=interleaved",
            "set pipeline=2 or more",
            "chunks=2 schedule=interleaved pipeline=2 microbatches=2",
        ),
    ],
    "`sequence=true` with `tensor=1`": [("sequence=true", "set tensor=2 or more", "sequence=true tensor=2")],
    "`attention=all-to-all` with `context=1`": [
        ("attention=all-to-all", "set context=2 or more", "context=2 attention=all-to-all"),
        ("data=2 attention=all-to-all", "or drop attention", "data=2"),
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
    "`compile=true` with `compress`": [
        (
            "compile=true compress=gist-fp8",
            "drop compile, or use compress=none",
            "compress=gist-fp8",
        ),
    ],
    "`compile=true` with `schedule=zero-bubble`": [
        (
            "pipeline=2 schedule=zero-bubble compile=true",
            "use schedule=1f1b, or drop compile",
            "pipeline=2 schedule=1f1b compile=true",
        ),
    ],
    "`gradients=same` with `precision=fp32` or `fp64`": [
        ("gradients=same", "drop gradients, or use precision=bf16", "gradients=same precision=bf16"),
        ("data=2 gradients=same precision=fp64", "precision=fp64: only", "data=2 precision=fp64"),
    ],
    "`checkpoints=split` with `recompute=none` or `selective`": [
        ("tensor=2 checkpoints=split", "use recompute=full", "tensor=2 checkpoints=split recompute=full"),
        (
            "tensor=2 checkpoints=split recompute=selective",
            "or drop checkpoints",
            "tensor=2 checkpoints=split recompute=sqrt",
        ),
    ],
    "`contiguous=true` with `zero` below 2 and `recompute=none` or `selective`": [
        ("contiguous=true", "use recompute=full", "contiguous=true recompute=full"),
        ("contiguous=true recompute=selective zero=1 data=2", "zero=2 or 3", "contiguous=true zero=2 data=2"),
    ],
    "`checkpoints=split` with `tensor=1` or `sequence=true`": [
        (
            "checkpoints=split recompute=full",
            "set tensor=2 or more",
            "tensor=2 checkpoints=split recompute=full",
        ),
        (
            "tensor=2 sequence=true checkpoints=split recompute=full",
            "without sequence",
            "tensor=2 sequence=true recompute=full",
        ),
    ],
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
    "`masters=false` with a precision other than `bf16`": [
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
}


def test_every_rule_has_an_example_and_every_example_a_rule() -> None:
    names = [rule.case for rule in RULES]
    assert len(set(names)) == len(names)
    assert set(EXAMPLES) == set(names)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.case)
def test_a_rule_refuses_its_examples_and_they_pass_without_it(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    for refused, words, fixed in EXAMPLES[rule.case]:
        (error,) = errors_of(refused)
        assert words in error
        assert isinstance(Plan.parse(fixed), Plan), "the fix that the message names"
    monkeypatch.setattr(plan, "RULES", tuple(other for other in RULES if other != rule))
    for refused, _, _ in EXAMPLES[rule.case]:
        assert isinstance(Plan.parse(refused), Plan), "no other rule refuses it"


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "interleaved"])
@pytest.mark.parametrize("zero", [1, 2])
def test_stages_that_the_rule_for_measured_ones_names_are_accepted(zero: int, schedule: str) -> None:
    """It named pipeline=2, whose stages have as few ranks."""
    rest = f"data=3 zero={zero} shard=2 microbatches=2 schedule={schedule}"
    (error,) = errors_of(f"pipeline=auto {rest}")
    advised = re.search(r"pipeline=\d\S*", error)
    takes_turns = schedule not in ASYNCHRONOUS_SCHEDULES and (zero, schedule) != (2, "naive")
    assert (advised is not None) == takes_turns
    if advised is not None:
        assert Plan.parse(f"{advised.group()} {rest}").stages == 2


@pytest.mark.parametrize(
    "text",
    [
        "chunks=2 schedule=order.txt",  # a file says itself how many chunks a rank has
        "pipeline=2 chunks=2 schedule=order.txt",
        "pipeline=2 zero=3",
        "pipeline=2-1 zero=1 schedule=naive",
        "pipeline=2-1 zero=2 schedule=gpipe",
        "pipeline=2 zero=2 schedule=pipedream",
        "pipeline=2 schedule=pipedream-2bw microbatches=2",
        "data=4 expert=4",
        "data=4 expert=2 zero=1 shard=2",
        "data=8 expert=4 zero=3 shard=2",  # each copy has one rank of some of the experts
        "data=2 expert=2 context=4 zero=3 shard=2",
        "data=4 expert=4 pipeline=2",
        "data=4 zero=1 shard=4",
        "data=2 context=3 zero=3 shard=6",
        "pipeline=4-2 zero=2 shard=2",
        "pipeline=auto data=2 context=2 zero=1 shard=4",
        "data=2 sync=async staleness=0 schedule=gpipe",
        "pipeline=auto zero=3 schedule=gpipe",
        "compile=true schedule=gpipe",
        "gradients=fp32 precision=fp64",
        "gradients=same precision=fp16",
    ],
)
def test_what_is_just_inside_a_rule_is_accepted(text: str) -> None:
    assert Plan.parse(text).schedule


def test_every_broken_rule_is_listed() -> None:
    assert len(errors_of("expert=2 staleness=1 chunks=2 pipeline=2")) == 3


def test_auto_is_not_checked_by_rules_that_need_its_stages() -> None:
    # `plan.stages` of pipeline=auto raises, so a rule that asked for it would hide the other errors.
    errors = errors_of("pipeline=auto schedule=interleaved chunks=2 microbatches=3 sync=async zero=3")
    assert [error.split(":")[0] for error in errors] == [
        "pipeline=auto schedule=interleaved",
        "pipeline=auto sync=async",
        "zero=3 sync=async",
    ]


class WatchedPlan:
    """A plan that notes which of its fields are read."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.read = plan, set[str]()

    def __getattr__(self, name: str) -> object:
        derived = {
            "stages": "pipeline",
            "replicas": "pipeline",
            "replicates_stages": "pipeline",
            "schedule_is_file": "schedule",
            "flushes": "schedule",
        }
        self.read.add(derived.get(name, name))
        return getattr(self.plan, name)


@given(plan_values)
def test_rules_read_no_field_but_those_they_name(fields: dict[str, object]) -> None:
    for rule in RULES:
        watched = WatchedPlan(draft(fields))
        if rule.is_broken(watched):  # type: ignore[arg-type]
            rule.error(watched)  # type: ignore[arg-type]
        assert watched.read <= set(rule.fields), rule
