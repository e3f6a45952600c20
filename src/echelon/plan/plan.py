"""The plan: how many ways along which axis, and which choices. Plain data: no torch, no device, no model.

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

from echelon.errors import did_you_mean, raise_faults
from echelon.plan.fields import FIELDS
from echelon.plan.rules import broken_rules


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training plan. Every field may be given as its value or as its text; all faults raise at once."""

    data: int = 1
    tensor: int = 1
    pipeline: int | tuple[int, ...] = 1
    expert: int = 1
    context: int = 1
    sync: str = "all-reduce"
    staleness: float = math.inf
    zero: int = 0
    schedule: str = "1f1b"
    microbatches: int = 1
    chunks: int = 1
    sequence: bool = False
    precision: str = "fp32"
    recompute: str = "none"
    offload: tuple[str, ...] = ()
    compress: str = "none"

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values, faults = _read_fields(given)
        for name, value in values.items():
            object.__setattr__(self, name, value)
        raise_faults("the plan", faults or list(broken_rules(self)))

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Read `field=value` words. The error lists every fault of the text at once."""
        given, faults = _split(text)
        values, more = _read_fields(given)
        raise_faults(f"plan '{text}'", faults + more)
        return cls(**values)

    def __str__(self) -> str:
        """The fields that are not at their default, in the order of the table; parses to an equal plan."""
        words = [
            f"{field.name}={shlex.quote(FIELDS[field.name].show(getattr(self, field.name)))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return " ".join(words) or "data=1"

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many replicas each pipeline stage has, within one replica along `data`."""
        return (1,) * self.pipeline if isinstance(self.pipeline, int) else self.pipeline

    @property
    def stages(self) -> int:
        """How many positions the pipeline has."""
        return len(self.replicas)

    @property
    def ranks(self) -> int:
        """How many ranks the plan takes (experts live on the data ranks)."""
        return sum(self.replicas) * self.data * self.context * self.tensor

    @property
    def schedule_is_file(self) -> bool:
        return "/" in self.schedule or self.schedule.endswith(".txt")


def _split(text: str) -> tuple[dict[str, str], list[str]]:
    """The `field=value` words of `text`, and the faults of words that are no such thing."""
    given: dict[str, str] = {}
    faults = []
    try:
        words = shlex.split(text)
    except ValueError as error:
        return {}, [f"{text!r}: {str(error).lower()}; close the quote"]
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value:
            faults.append(f"{word}: must be written field=value, like data=2")
        elif name not in FIELDS:
            faults.append(f"{word}: there is no field '{name}'{did_you_mean(name, FIELDS)}")
        elif name in given:
            faults.append(f"{word}: '{name}' stands twice ({name}={given[name]} before); keep one")
        else:
            given[name] = value
    return given, faults


def _read_fields(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Each field's value, and one fault for each that its reader refuses."""
    values, faults = {}, []
    for name, value in given.items():
        try:
            values[name] = FIELDS[name].read(value)
        except (ValueError, KeyError, IndexError, TypeError):
            faults.append(f"{name}={value}: {FIELDS[name].allowed}")
    return values, faults
