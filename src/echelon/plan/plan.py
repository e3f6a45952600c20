"""The plan: the degree along each axis, and the choices. Plain data: no torch, no device, no model.

>>> plan = Plan.parse("data=2 pipeline=2 zero=1 microbatches=4")
>>> plan.ranks
4
>>> str(plan)
'data=2 pipeline=2 zero=1 microbatches=4'
"""

import dataclasses
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echelon.errors import UserError, did_you_mean, raise_errors
from echelon.plan.fields import ASYNCHRONOUS_SCHEDULES, FIELDS, NumberError
from echelon.plan.rules import broken_rules


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training plan. Every field takes a value or its text; all errors are raised at once."""

    data: int = 1
    tensor: int = 1
    pipeline: int | tuple[int, ...] | str = 1
    expert: int = 1
    context: int = 1
    attention: str = "ring"
    sync: str = "all-reduce"
    staleness: float = math.inf
    zero: int = 0
    shard: int = 0
    schedule: str = "1f1b"
    microbatches: int = 1
    chunks: int = 1
    sequence: bool = False
    compile: bool = False
    precision: str = "fp32"
    gradients: str = "fp32"
    recompute: str = "none"
    checkpoints: str = "whole"
    contiguous: bool = False
    update: str = "step"
    masters: bool = True
    offload: tuple[str, ...] = ()
    delay: int = 0
    compress: str = "none"
    debug: bool = False

    def __post_init__(self) -> None:
        arguments = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values, errors = _read_fields(arguments)
        for name, value in values.items():
            object.__setattr__(self, name, value)
        raise_errors("the plan", [*errors.values(), *broken_rules(self, errors)])

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Read `field=value` words. A UserError lists every error of the text."""
        texts, misspelt = _split(text)
        values, errors = _read_fields(texts)
        broken = broken_rules(_draft(values), [*errors, *(word.partition("=")[0] for word in misspelt)])
        raise_errors(f"plan '{text}'", [*misspelt.values(), *errors.values(), *broken])
        return cls(**values)

    def __str__(self) -> str:
        """The fields that are not at their default, in the order of the table. Parses to an equal plan."""
        words = [
            f"{field.name}={shlex.quote(FIELDS[field.name].show(getattr(self, field.name)))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return " ".join(words) or "data=1"

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many replicas each pipeline stage has, within one replica along `data`."""
        if isinstance(self.pipeline, str):
            raise UserError(
                f"plan '{self}': pipeline=auto has no stages until a model was measured; let "
                "parallelize resolve it, or give the stages, like pipeline=2"
            )
        return (1,) * self.pipeline if isinstance(self.pipeline, int) else self.pipeline

    @property
    def stages(self) -> int:
        """How many positions the pipeline has."""
        return len(self.replicas)

    @property
    def ranks(self) -> int:
        """How many ranks the plan needs (experts are on the data ranks)."""
        return sum(self.replicas) * self.data * self.context * self.tensor

    @property
    def frees_weights(self) -> bool:
        """Whether weights come and go: they are gathered for each use, or fetched from host memory."""
        return self.zero == 3 or "parameters" in self.offload

    @property
    def flushes(self) -> bool:
        """The schedule empties the pipeline at the end of each step. Others never drain: a microbatch meets
        weights that are some updates old."""
        return self.schedule not in ASYNCHRONOUS_SCHEDULES

    @property
    def updates_per_step(self) -> int:
        """How many updates a step makes: PipeDream updates after each microbatch, others once."""
        return self.microbatches if self.schedule in ("pipedream", "pipedream-vertical") else 1

    @property
    def schedule_is_file(self) -> bool:
        return "/" in self.schedule or self.schedule.endswith(".txt")


def _draft(values: Mapping[str, Any]) -> Plan:
    """An unchecked plan for the rules to read: defaults where `values` has no entry."""
    draft = object.__new__(Plan)
    draft.__dict__.update({field.name: field.default for field in dataclasses.fields(Plan)} | dict(values))
    return draft


def _split(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """The `field=value` words of `text`, and by word the errors of the other words."""
    texts: dict[str, str] = {}
    errors: dict[str, str] = {}
    try:
        words = shlex.split(text)
    except ValueError as error:
        return {}, {text: f"{text!r}: {str(error).lower()}; close the quote"}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value:
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
            errors[name] = f"{name}={value}: {FIELDS[name].allowed}"
    return values, errors
