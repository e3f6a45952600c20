"""The plan prints and parses, and refuses with every error at once."""

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import UserError
from echelon.plan import ASYNCHRONOUS_SCHEDULES, FIELDS, SCHEDULES, Plan
from echelon.plan.plan import RULES, draft
from tests.plan.examples import Examples, check_rule, errors_of, plan_values


def test_the_designs_example_parses_and_prints() -> None:
    text = "data=2 tensor=2 pipeline=2 zero=1 microbatches=8 precision=bf16"
    plan = Plan.parse(text)
    assert (plan.data, plan.tensor, plan.pipeline, plan.zero, plan.microbatches) == (2, 2, 2, 1, 8)
    assert str(plan) == text
    assert Plan.parse(f"{text} schedule=1f1b") == plan
    assert plan.ranks == 8


def test_the_empty_plan_is_one_device() -> None:
    assert Plan.parse("") == Plan() == Plan.parse(str(Plan()))
    assert Plan().ranks == 1


def test_all_four_errors_are_listed_each_with_its_allowed_values() -> None:
    errors = errors_of("data=0 tensor=x zero=7 schedule=zigzag")
    assert errors == (
        "data=0: must be an integer, at least 1",
        "tensor=x: must be an integer, at least 1",
        "zero=7: must be one of 0, 1, 2, 3",
        f"schedule=zigzag: must be one of {', '.join(SCHEDULES)}, or a file ending in .txt",
    )


def test_errors_of_words_and_of_values_come_together() -> None:
    errors = errors_of("dta=2 zero=9 fast data=2 data=4")
    assert len(errors) == 4
    assert "did you mean 'data'?" in errors[0]
    assert errors[1] == "fast: must be written field=value, like data=2"
    assert "is given twice" in errors[2]
    assert errors[3].startswith("zero=9")


def test_an_open_quote_is_a_error_not_a_traceback() -> None:
    assert "close the quote" in errors_of("schedule='a b.txt")[0]


def test_replicated_stages() -> None:
    plan = Plan.parse("pipeline=3-1 data=2")
    assert plan.pipeline == (3, 1)
    assert (plan.stages, plan.replicas, plan.ranks) == (2, (3, 1), 8)
    assert Plan.parse("pipeline=1-1") == Plan(pipeline=2)
    assert Plan(pipeline=(2, 1, 1)).ranks == 4


def test_a_plan_says_whether_its_schedule_flushes_and_how_many_updates_a_step_makes() -> None:
    texts = [f"pipeline=2 microbatches=4 schedule={name}" for name in SCHEDULES if name != "interleaved"]
    plans = [Plan.parse(text) for text in (*texts, "pipeline=2 microbatches=4 schedule=order.txt")]
    late = {plan.schedule: plan.updates_per_step for plan in plans if not plan.flushes}
    assert late == {"pipedream": 4, "pipedream-vertical": 4, "pipedream-2bw": 1}
    assert {plan.updates_per_step for plan in plans if plan.flushes} == {1}


@pytest.mark.parametrize(
    "bad", [{"data": True}, {"data": 1.5}, {"zero": -1}, {"pipeline": ()}, {"sequence": 2}, {"compile": 2}]
)
def test_python_values_are_checked_like_text(bad: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(bad))}="):
        Plan(**bad)  # type: ignore[arg-type]


@given(plan_values)
def test_any_accepted_plan_survives_its_text(fields: dict[str, object]) -> None:
    try:
        plan = Plan(**fields)  # type: ignore[arg-type]
    except UserError as error:
        assert error.errors
        return
    assert Plan.parse(str(plan)) == plan
    assert plan.ranks >= plan.data


@given(st.text(max_size=40))
def test_no_text_gets_past_as_anything_but_a_plan_or_a_user_error(text: str) -> None:
    try:
        assert isinstance(Plan.parse(text), Plan)
    except UserError as error:
        assert error.errors


def test_a_plan_needs_no_torch() -> None:
    code = "import sys, echelon.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_faulty_field_does_not_hide_the_rules_between_the_others() -> None:
    # It did: rules were asked only of plans whose every field could be read.
    errors = errors_of("data=0 expert=2 staleness=2 schedule=zigzag chunks=2 zero=1 sync=async=")
    assert [error.split(":")[0] for error in errors] == ["data=0", "schedule=zigzag", "sync=async="]
    errors = errors_of("tensor=x expert=2 staleness=2 fast")
    assert [error.split(":")[0] for error in errors] == [
        "fast",
        "tensor=x",
        "expert=2 data=1",
        "staleness=2 sync=all-reduce",
    ]
    with pytest.raises(UserError) as caught:
        Plan(tensor=0, expert=2)
    assert len(caught.value.errors) == 2


def test_what_stands_twice_is_not_judged_by_its_first_value() -> None:
    (error,) = errors_of("data=3 data=4 expert=2")
    assert "is given twice" in error


def test_compiled_layers_are_not_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    (rule,) = FIELDS["compress"].rules
    examples: Examples = {
        "`compile=true` with `compress`": [
            (
                "compile=true compress=gist-fp8",
                "drop compile, or use compress=none",
                "compress=gist-fp8",
            ),
        ],
    }
    check_rule(rule, examples[rule.case], monkeypatch)


GRAPHS: Examples = {
    "`graphs=true` with several ranks": [
        (f"graphs=true {words}", "use graphs=auto, or one rank", f"graphs=auto {words}")
        for words in ("data=2", "tensor=2", "context=2", "pipeline=2")
    ],
    **{
        case: [(f"graphs=true {words}", f"use graphs=auto, or {fix}", f"graphs=true {fix}")]
        for case, words, fix in (
            ("`graphs=true` with `offload`", "offload=optimizer", "offload=none"),
            ("`graphs=true` with `recompute`", "recompute=full", "recompute=none"),
            ("`graphs=true` with `update=backward`", "update=backward", "update=step"),
            ("`graphs=true` with `precision=fp8`", "precision=fp8", "precision=bf16"),
            ("`graphs=true` with a schedule that never drains", "schedule=pipedream", "schedule=1f1b"),
        )
    },
}


@pytest.mark.parametrize("case", sorted({rule.case for rule in FIELDS["graphs"].rules} | set(GRAPHS)))
def test_what_is_not_recorded_is_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (rule,) = (rule for rule in FIELDS["graphs"].rules if rule.case == case)
    check_rule(rule, GRAPHS[case], monkeypatch)


def test_the_cases_of_rules_differ() -> None:
    assert len({rule.case for rule in RULES}) == len(RULES)


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
