"""The description of a field of a plan: once, in the class that holds it.

An entry says all: the default, the values, how they are read from text or a Python value, one sentence of
meaning, the axis that the field is about, and the rules between it and other fields. Parsing, checking, error
messages and the tables of docs/plan.md come from it. Another field is another entry.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from echelon.plan.plan import Plan

_TOO_MANY = 10**6  # ranks, stages or microbatches: rules and schedules read each
_DIGITS = len(str(_TOO_MANY))


class NumberError(ValueError):
    """Says what a number must be, where the sentence of its field would not explain the refusal."""


class Rule(NamedTuple):
    """A combination of fields that is refused. Its error is `field=value …: why; fix`. A rule is checked once
    each of its fields is valid on its own. Texts may hold {plan.field}."""

    case: str  # the combination, for the documentation
    shown: tuple[str, ...]  # the fields that it reads, in the order in which the error shows them
    is_broken: Callable[["Plan"], bool]
    why: str | Callable[["Plan"], str]  # the docstring of a function is its text for the documentation
    fix: str | Callable[["Plan"], str]
    hidden: tuple[str, ...] = ()  # fields that it also reads
    measured: bool = False  # it is of pipeline=auto, whose stages are not known; others need the stages

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.shown, *self.hidden)

    def error(self, plan: "Plan") -> str:
        """The reason and the fix, for the values of this plan."""
        texts = (part if isinstance(part, str) else part(plan) for part in (self.why, self.fix))
        return "; ".join(text.format(plan=plan) for text in texts)


@dataclass(frozen=True)
class Field:
    """One field: what it accepts and means. `read` returns a value or raises ValueError, `show` prints it."""

    values: str
    read: Callable[[Any], Any]
    meaning: str
    rules: tuple[Rule, ...] = ()
    axis: str = ""
    options: tuple[str, ...] = ()
    show: Callable[[Any], str] = str


def described(
    default: Any, values: str, read: Callable[[Any], Any], meaning: str, *rules: Rule, **details: Any
) -> Any:
    """An entry of a plan's class; `details` are the other attributes of its `Field`."""
    entry = Field(values, read, meaning, rules, **details)
    return dataclasses.field(default=default, metadata={"field": entry})


def count(meaning: str, *rules: Rule, axis: str = "") -> Any:
    """An entry for a number of something, 1 unless given."""
    return described(1, "an integer, at least 1", number_of, meaning, *rules, axis=axis)


def choice(default: str, options: tuple[str, ...], meaning: str, *rules: Rule, axis: str = "") -> Any:
    """An entry for one of several words."""
    values = f"one of {', '.join(options)}"
    return described(
        default,
        values,
        lambda value: options[options.index(str(value))],
        meaning,
        *rules,
        axis=axis,
        options=options,
    )


def level(highest: int, meaning: str, *rules: Rule, axis: str = "") -> Any:
    """An entry for an integer from 0, the default, to `highest`."""
    levels = range(highest + 1)
    options = tuple(map(str, levels))
    values = f"one of {', '.join(options)}"
    return described(
        0, values, lambda value: levels[integer(value, 0)], meaning, *rules, axis=axis, options=options
    )


def switch(default: bool, meaning: str, *rules: Rule, axis: str = "") -> Any:
    """An entry for true or false."""
    words = {"true": True, "false": False}
    return described(
        default,
        "true or false",
        lambda value: words[str(value).lower()],
        meaning,
        *rules,
        axis=axis,
        options=tuple(words),
        show=lambda value: str(value).lower(),
    )


def integer(value: Any, minimum: int) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    number = int(plain_digits(value))
    if number < minimum:
        raise ValueError
    return number


def plain_digits(value: Any) -> Any:
    """The value, unless it is text with digits of another script: int('２') is 2."""
    if not isinstance(value, str) or value.isascii():
        return value
    if any(each.isdecimal() and not each.isascii() for each in value):
        raise NumberError("numbers must be written with the digits 0 to 9")
    return value


def number_of(value: Any, minimum: int = 1) -> int:
    """Read a number of ranks, stages or microbatches that a person can mean."""
    if isinstance(value, str) and len(value) < _DIGITS and value.isascii() and value.isdecimal():
        return integer(int(value), minimum)
    text = plain_digits(value)
    # int() of thousands of digits would take seconds, or raise.
    is_long = isinstance(text, str) and text.isdecimal() and len(text.lstrip("0")) >= _DIGITS
    if is_long or integer(text, minimum) >= _TOO_MANY:
        raise NumberError(f"must be below {_TOO_MANY:,}")
    return int(text)
