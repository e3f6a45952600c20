"""Every rule refuses what it should, names a fix that works, and is missed when it is gone."""

import re

import pytest
from hypothesis import given

from echelon.plan import Plan, rules
from echelon.plan.auto_rules import AUTO_RULES
from echelon.plan.fields import ASYNCHRONOUS_SCHEDULES, SCHEDULES
from echelon.plan.plan import _draft
from echelon.plan.rule import Rule
from echelon.plan.rules import RULES
from tests.plan.examples import errors_of, plan_values

# By rule: a plan that breaks this rule alone, words of the error, and the plan after the fix that it names.
EXAMPLES: dict[str, list[tuple[str, str, str]]] = {
    "expert_divides_data": [
        ("expert=2", "1 is not divisible by 2", "data=2 expert=2"),
        ("data=3 expert=2", "set data to a multiple of 2", "data=4 expert=2"),
    ],
    "experts_need_even_stages": [
        ("data=2 expert=2 pipeline=2-1", "pipeline=2 data=N", "data=2 expert=2 pipeline=2"),
        ("data=2 expert=2 pipeline=1-3", "or expert=1", "data=2 pipeline=1-3"),
    ],
    "experts_are_sharded_evenly": [
        ("data=6 expert=2 zero=1 shard=3", "set shard to a multiple of 2", "data=6 expert=2 zero=1 shard=6"),
        (
            "data=2 expert=2 context=3 zero=3 shard=2",
            "(expert × context)",
            "data=2 expert=2 context=3 zero=3",
        ),
    ],
    "staleness_needs_async": [
        ("staleness=2", "add sync=async", "staleness=2 sync=async"),
        ("data=2 sync=parameter-server staleness=0", "drop staleness", "data=2 sync=parameter-server"),
    ],
    "server_has_no_shards": [
        ("data=2 sync=async zero=1", "use zero=0", "data=2 sync=async"),
        ("data=2 sync=parameter-server zero=2", "or sync=all-reduce", "data=2 zero=2"),
        ("data=4 sync=async zero=1 shard=2", "use zero=0 without shard", "data=4 sync=async"),
    ],
    "shard_needs_zero": [
        ("data=4 shard=2", "set zero=1 or more", "data=4 shard=2 zero=1"),
        ("data=4 shard=2 sync=async", "(with sync=all-reduce), or drop shard", "data=4 sync=async"),
    ],
    "shard_divides_every_stage": [
        (
            "data=6 zero=3 shard=4",
            "stage 0 has 6 of them (replicas × data × context), not divisible by 4",
            "data=8 zero=3 shard=4",
        ),
        ("context=3 zero=1 shard=2", "set data to a multiple of 2", "data=2 context=3 zero=1 shard=2"),
        ("pipeline=4-2 zero=1 shard=4", "stage 1 has 2 of them", "pipeline=4-2 zero=1"),
    ],
    "chunks_need_interleaved": [
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
    "interleaved_needs_full_rounds": [
        (
            "pipeline=2 schedule=interleaved chunks=2 microbatches=3",
            "set microbatches to a multiple of 2",
            "pipeline=2 schedule=interleaved chunks=2 microbatches=4",
        ),
    ],
    "interleaved_needs_even_stages": [
        (
            "pipeline=2-1 schedule=interleaved chunks=2 microbatches=2",
            "every stage has the same ranks; use pipeline=2",
            "pipeline=2 schedule=interleaved chunks=2 microbatches=2",
        ),
    ],
    "two_versions_need_microbatches": [
        (
            "pipeline=4 schedule=pipedream-2bw microbatches=2",
            "set microbatches=4 or more",
            "pipeline=4 schedule=pipedream-2bw microbatches=4",
        ),
    ],
    "stashed_versions_need_weights": [
        (
            "pipeline=2 data=2 zero=3 schedule=pipedream",
            "use zero=1",
            "pipeline=2 data=2 zero=1 schedule=pipedream",
        ),
        ("data=2 zero=3 schedule=pipedream-vertical", "or schedule=1f1b", "data=2 zero=3"),
    ],
    "asynchronous_schedules_need_even_stages": [
        (
            "pipeline=2-1 schedule=pipedream-vertical microbatches=2",
            "different weight versions; use schedule=1f1b",
            "pipeline=2-1 microbatches=2",
        ),
        ("pipeline=2-2 schedule=pipedream", "pipeline=2 data=N", "pipeline=2 data=2 schedule=pipedream"),
    ],
    "zero3_needs_even_stages": [
        ("pipeline=2-1 zero=3", "use zero=2", "pipeline=2-1 zero=2"),
        ("pipeline=2-2 zero=3", "pipeline=2 data=N", "pipeline=2 data=2 zero=3"),
    ],
    "zero3_needs_whole_backwards": [
        ("data=2 zero=3 schedule=zero-bubble", "use zero=2", "data=2 zero=2 schedule=zero-bubble"),
    ],
    "zero2_needs_replicas_in_step": [
        ("pipeline=2-1 zero=2 schedule=naive", "use zero=1", "pipeline=2-1 zero=1 schedule=naive"),
        ("pipeline=2-1 zero=2 schedule=order.txt", "or schedule=1f1b", "pipeline=2-1 zero=2"),
    ],
    "one_kind_of_asynchrony": [
        ("data=2 sync=async schedule=pipedream", "use sync=all-reduce", "data=2 schedule=pipedream"),
    ],
    "async_workers_need_whole_models": [
        (
            "data=2 sync=async pipeline=2",
            "sync=async pipeline=2: an asynchronous worker",
            "data=2 sync=async",
        ),
    ],
    "chunks_need_stages": [
        (
            "chunks=2 schedule=interleaved",
            "set pipeline=2 or more",
            "chunks=2 schedule=interleaved pipeline=2 microbatches=2",
        ),
    ],
    "sequence_needs_tensor": [("sequence=true", "set tensor=2 or more", "sequence=true tensor=2")],
    "attention_needs_context": [
        ("attention=all-to-all", "set context=2 or more", "context=2 attention=all-to-all"),
        ("data=2 attention=all-to-all", "or drop attention", "data=2"),
    ],
    "async_workers_share_no_matrix": [
        ("data=2 sync=async tensor=2", "use sync=all-reduce, or tensor=1", "data=2 tensor=2"),
    ],
    "async_workers_share_no_sequence": [
        ("data=2 sync=async context=2", "use sync=all-reduce, or context=1", "data=2 context=2"),
    ],
    "async_workers_share_no_experts": [
        ("data=2 sync=async expert=2", "use sync=all-reduce, or expert=1", "data=2 expert=2"),
    ],
    "compress_needs_uncompiled_layers": [
        (
            "compile=true compress=gist-fp8",
            "drop compile, or use compress=none",
            "compress=gist-fp8",
        ),
    ],
    "compile_needs_whole_backwards": [
        (
            "pipeline=2 schedule=zero-bubble compile=true",
            "use schedule=1f1b, or drop compile",
            "pipeline=2 schedule=1f1b compile=true",
        ),
    ],
    "same_gradients_need_low_precision": [
        ("gradients=same", "drop gradients, or use precision=bf16", "gradients=same precision=bf16"),
        ("data=2 gradients=same precision=fp64", "precision=fp64: only", "data=2 precision=fp64"),
    ],
    "split_checkpoints_need_whole_layers": [
        ("tensor=2 checkpoints=split", "use recompute=full", "tensor=2 checkpoints=split recompute=full"),
        (
            "tensor=2 checkpoints=split recompute=selective",
            "or drop checkpoints",
            "tensor=2 checkpoints=split recompute=sqrt",
        ),
    ],
    "contiguous_needs_checkpoints_or_gradients": [
        ("contiguous=true", "use recompute=full", "contiguous=true recompute=full"),
        ("contiguous=true recompute=selective zero=1 data=2", "zero=2 or 3", "contiguous=true zero=2 data=2"),
    ],
    "split_checkpoints_need_tensor": [
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
    "update_in_backward_needs_one_microbatch": [
        ("update=backward microbatches=2", "or update=last-backward", "update=last-backward microbatches=2"),
    ],
    "update_in_backward_needs_flushed_schedules": [
        (
            "pipeline=2 schedule=pipedream update=backward",
            "or schedule=1f1b",
            "pipeline=2 schedule=1f1b update=backward",
        ),
    ],
    "update_in_backward_needs_all_reduce": [
        ("data=2 sync=async update=backward", "or sync=all-reduce", "data=2 update=backward"),
    ],
    "update_in_backward_needs_no_loss_scaling": [
        ("precision=fp16 update=backward", "use precision=bf16", "precision=bf16 update=backward"),
    ],
    "no_masters_need_bf16": [
        ("masters=false", "use precision=bf16", "masters=false precision=bf16"),
        ("masters=false precision=fp16", "or drop masters", "precision=fp16"),
    ],
    "no_masters_need_all_reduce": [
        (
            "data=2 masters=false precision=bf16 sync=async",
            "use sync=all-reduce",
            "data=2 masters=false precision=bf16",
        ),
    ],
    "offloaded_parameters_need_flushed_schedules": [
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
    "offloaded_parameters_need_whole_backwards": [
        (
            "pipeline=2 offload=parameters schedule=zero-bubble",
            "use schedule=1f1b",
            "pipeline=2 offload=parameters",
        ),
    ],
    "offloaded_parameters_need_all_reduce": [
        (
            "data=2 offload=parameters sync=parameter-server",
            "use sync=all-reduce",
            "data=2 offload=parameters",
        ),
        ("data=2 offload=parameters sync=async", "or drop offload", "data=2 sync=async"),
    ],
    "delay_needs_offload": [
        ("delay=1", "add offload=optimizer", "delay=1 offload=optimizer"),
        ("delay=1 offload=activations", "or drop delay", "offload=activations"),
    ],
    "delay_needs_whole_updates": [
        (
            "delay=1 offload=optimizer update=backward",
            "use update=step",
            "delay=1 offload=optimizer",
        ),
    ],
    "host_updates_need_flushed_schedules": [
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
    "host_updates_need_all_reduce": [
        ("data=2 sync=async offload=optimizer", "use sync=all-reduce", "data=2 offload=optimizer"),
        (
            "data=2 sync=parameter-server offload=optimizer",
            "or drop offload=optimizer",
            "data=2 sync=parameter-server",
        ),
    ],
    "auto_needs_one_stage_per_rank": [
        (
            "pipeline=auto schedule=interleaved chunks=2",
            "give the stages",
            "pipeline=2 schedule=interleaved chunks=2 microbatches=2",
        ),
        ("pipeline=auto schedule=order.txt", "use another schedule", "pipeline=auto"),
    ],
    "auto_needs_shards_within_data": [
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
    "auto_needs_synchronous_training": [
        ("pipeline=auto sync=async", "use pipeline=1", "pipeline=1 sync=async"),
    ],
}


def test_every_rule_has_an_example_and_every_example_a_rule() -> None:
    names = [rule.name for rule in (*RULES, *AUTO_RULES)]
    assert len(set(names)) == len(names)
    assert set(EXAMPLES) == set(names)


@pytest.mark.parametrize("rule", [*RULES, *AUTO_RULES], ids=lambda rule: rule.name)
def test_a_rule_refuses_its_examples_and_they_pass_without_it(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    for refused, words, fixed in EXAMPLES[rule.name]:
        (error,) = errors_of(refused)
        assert words in error
        assert isinstance(Plan.parse(fixed), Plan), "the fix that the message names"
    monkeypatch.setattr(rules, "RULES", tuple(other for other in RULES if other != rule))
    monkeypatch.setattr(rules, "AUTO_RULES", tuple(other for other in AUTO_RULES if other != rule))
    for refused, _, _ in EXAMPLES[rule.name]:
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
        "zero=3 sync=async",
        "pipeline=auto schedule=interleaved",
        "pipeline=auto sync=async",
    ]


class WatchedPlan:
    """A plan that notes which of its fields are read."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.read = plan, set[str]()

    def __getattr__(self, name: str) -> object:
        derived = {
            "stages": "pipeline",
            "replicas": "pipeline",
            "schedule_is_file": "schedule",
            "flushes": "schedule",
        }
        self.read.add(derived.get(name, name))
        return getattr(self.plan, name)


@given(plan_values)
def test_rules_read_no_field_but_those_they_name(fields: dict[str, object]) -> None:
    for rule in RULES:
        watched = WatchedPlan(_draft(fields))
        rule.error(watched)  # type: ignore[arg-type]
        assert watched.read <= set(rule.fields), rule
