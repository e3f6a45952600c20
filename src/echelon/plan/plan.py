"""The plan: the degree along each axis, and the choices. Plain data: no torch, no device, no model.

>>> plan = Plan.parse("data=2 pipeline=2 zero=1 microbatches=4")
>>> plan.ranks
4
>>> str(plan)
'data=2 pipeline=2 zero=1 microbatches=4'
"""

import dataclasses
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from echelon.errors import UserError, did_you_mean, raise_errors
from echelon.plan.axes import ASYNCHRONOUS_SCHEDULES, AUTO, Axes, Schedule, is_schedule_file
from echelon.plan.compute import Compute
from echelon.plan.field import Field, NumberError, Rule, choice, switch
from echelon.plan.state import Replicas, Update


def _asks_beside(plan: "Plan", *, field: str, default: Any) -> bool:
    return plan.graphs == "true" and getattr(plan, field) != default


_NOT_RECORDED = (
    ("offload", "offload", (), "copies to and from the host run between the operations of passes"),
    ("recompute", "recompute", "none", "layers run again in the backward pass, by code that watches them"),
    ("update", "update=backward", "step", "updates run between the operations of passes"),
)


# The text of a plan lists the fields of the last base first, and checkpoints hold that text: another order of
# bases or fields makes saved plans unequal to the same plans of today. A new field goes to the end, here.
@dataclass(frozen=True, kw_only=True)
class Plan(Update, Compute, Schedule, Replicas, Axes):
    """One training plan. Every field takes a value or its text; all errors are raised at once."""

    compress: str = choice(
        "none",
        ("none", "gist", "gist-fp16", "gist-fp10", "gist-fp8"),
        "what layers save for the backward pass is kept in fewer bits ([gist.md](gist.md))",
        Rule(
            "`compile=true` with `compress`",
            ("compile", "compress"),
            lambda plan: plan.compile and plan.compress != "none",
            "a compiled layer fuses operations and chooses itself what it keeps for the backward pass, so "
            "its ReLU and pools are not seen",
            "drop compile, or use compress=none",
        ),
    )
    debug: bool = switch(
        False,
        "ranks [compare what they call](hangs.md#ranks-that-call-different-operations) before data moves; "
        "slow",
    )
    graphs: str = choice(
        "false",
        ("auto", "true", "false"),
        "the passes of a short step are recorded, and replayed as one [CUDA graph](graphs.md): where the "
        "host is the slower one, or always",
        Rule(
            "`graphs=true` with several ranks",
            ("graphs", "data", "tensor", "pipeline", "context"),
            lambda plan: (
                plan.graphs == "true"
                and (plan.data > 1 or plan.tensor > 1 or plan.context > 1 or plan.pipeline != 1)
            ),
            "messages between ranks go on behind passes, and are no part of a recording",
            "use graphs=auto, or one rank",
        ),
        *(
            Rule(
                f"`graphs=true` with `{words}`",
                ("graphs", field),
                partial(_asks_beside, field=field, default=default),
                why,
                f"use graphs=auto, or {field}={default or 'none'}",
            )
            for field, words, default, why in _NOT_RECORDED
        ),
        Rule(
            "`graphs=true` with `precision=fp8`",
            ("graphs", "precision"),
            lambda plan: plan.graphs == "true" and plan.precision == "fp8",
            "scales of products in 8 bits are another library's, and were not tried in a recording",
            "use graphs=auto, or precision=bf16",
        ),
        Rule(
            "`graphs=true` with a schedule that never drains",
            ("graphs", "schedule"),
            lambda plan: plan.graphs == "true" and not plan.flushes,
            "its passes meet weights of other updates in each step",
            "use graphs=auto, or schedule=1f1b",
        ),
    )

    def __post_init__(self) -> None:
        values, errors = _read_fields({name: getattr(self, name) for name in FIELDS})
        for name, value in values.items():
            object.__setattr__(self, name, value)
        raise_errors("the plan", [*errors.values(), *broken_rules(self, errors)])

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Read `field=value` words. A UserError lists every error of the text."""
        texts, misspelt = _split(text)
        values, errors = _read_fields(texts)
        plan = draft(values)
        broken = broken_rules(plan, [*errors, *(word.partition("=")[0] for word in misspelt)])
        raise_errors(f"plan '{text}'", [*misspelt.values(), *errors.values(), *broken])
        return plan

    def __str__(self) -> str:
        """The fields that are not at their default, in the order of the table. Parses to an equal plan."""
        words = [
            f"{name}={shlex.quote(FIELDS[name].show(value))}"
            for name, default in _DEFAULTS.items()
            if (value := getattr(self, name)) != default
        ]
        return " ".join(words) or "data=1"

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of replicas of each pipeline stage, within one replica along `data`."""
        if isinstance(self.pipeline, str):
            raise UserError(
                f"plan '{self}': pipeline=auto has no stages until a model was measured; let "
                "parallelize resolve it, or give the stages, like pipeline=2"
            )
        return (1,) * self.pipeline if isinstance(self.pipeline, int) else self.pipeline

    @property
    def stages(self) -> int:
        """The number of positions of the pipeline."""
        return len(self.replicas)

    @property
    def ranks(self) -> int:
        """The number of ranks that the plan needs (experts are on the data ranks)."""
        return sum(self.replicas) * self.data * self.context * self.tensor

    @property
    def frees_weights(self) -> bool:
        """Weights are gathered for each use, or fetched from host memory, and freed after it."""
        return self.zero == 3 or "parameters" in self.offload

    @property
    def flushes(self) -> bool:
        """The schedule empties the pipeline at the end of each step. Others never drain: a microbatch meets
        weights that are some updates old."""
        return self.schedule not in ASYNCHRONOUS_SCHEDULES

    @property
    def replicates_stages(self) -> bool:
        """A stage has replicas of its own, which take microbatches in turn, beside those along `data`."""
        return set(self.replicas) != {1}

    @property
    def updates_per_step(self) -> int:
        """The number of updates in a step: PipeDream updates after each microbatch, others once."""
        return self.microbatches if self.schedule in ("pipedream", "pipedream-vertical") else 1

    @property
    def schedule_is_file(self) -> bool:
        return is_schedule_file(self.schedule)


FIELDS: dict[str, Field] = {field.name: field.metadata["field"] for field in dataclasses.fields(Plan)}
RULES: tuple[Rule, ...] = tuple(rule for field in FIELDS.values() for rule in field.rules)
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Plan)}
_QUOTES = frozenset("'\"\\")


def broken_rules(plan: Plan, invalid: Collection[str] = ()) -> Iterator[str]:
    """The error of every rule that `plan` breaks. A rule that reads an `invalid` field is skipped."""
    is_auto = plan.pipeline == AUTO
    for rule in RULES:
        is_about_plan = rule.measured if is_auto and "pipeline" in rule.fields else not rule.measured
        is_readable = not invalid or set(rule.fields).isdisjoint(invalid)
        if is_about_plan and is_readable and rule.is_broken(plan):
            shown = (f"{name}={FIELDS[name].show(getattr(plan, name))}" for name in rule.shown)
            yield f"{' '.join(shown)}: {rule.error(plan)}"


def read_words(text: str) -> dict[str, Any]:
    """The values of `field=value` words that are a part of a plan, so that no rule between fields holds yet.
    A UserError lists every error of the text."""
    texts, misspelt = _split(text)
    values, errors = _read_fields(texts)
    raise_errors(f"plan '{text}'", [*misspelt.values(), *errors.values()])
    return values


def draft(values: Mapping[str, Any]) -> Plan:
    """An unchecked plan for the rules to read: defaults where `values` has no entry."""
    plan = object.__new__(Plan)
    plan.__dict__.update(_DEFAULTS | dict(values))
    return plan


def _split(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """The `field=value` words of `text`, and by word the errors of the other words."""
    texts: dict[str, str] = {}
    errors: dict[str, str] = {}
    try:
        is_plain = text.isascii() and text.isprintable() and _QUOTES.isdisjoint(text)
        words = text.split() if is_plain else shlex.split(text)
    except ValueError as error:
        return {}, {text: f"{text!r}: {str(error).lower()}; close the quote"}
    for word in words:
        name, equals, value = word.partition("=")
        if word == AUTO:
            errors[word] = (
                "auto: the planner chooses for parallelize and `echelon train`, where it is the first word; "
                "here say a plan, like data=2 (`echelon plan` shows the best)"
            )
        elif not equals or not value:
            errors[word] = f"{word}: must be written field=value, like data=2"
        elif name not in FIELDS:
            errors[word] = f"{word}: there is no field '{name}'{did_you_mean(name, FIELDS)}"
        elif name in texts:
            errors[word] = f"{word}: '{name}' is given twice ({name}={texts[name]} and {word})"
        else:
            texts[name] = value
    return texts, errors


def _read_fields(texts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The value of each field, and by field the error of each that its reader refuses."""
    values: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name, value in texts.items():
        try:
            values[name] = FIELDS[name].read(value)
        except NumberError as error:
            errors[name] = f"{name}={value}: {error}"
        except (ValueError, KeyError, IndexError, TypeError, OverflowError):
            errors[name] = f"{name}={value}: must be {FIELDS[name].values}"
    return values, errors
