"""What each field of a plan accepts: how its text is read, printed and explained.

There is one entry per field. A reader returns the value or raises ValueError; the user then sees the entry's
`allowed` sentence, or that of a NumberError. Rules between fields are in rules.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from echelon.quantities import read_bytes

# Flushed schedules empty the pipeline at the end of each step. Asynchronous ones never drain: a microbatch
# meets weights that are some updates old.
FLUSHED_SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")
ASYNCHRONOUS_SCHEDULES = ("pipedream", "pipedream-vertical", "pipedream-2bw")
SCHEDULES = (*FLUSHED_SCHEDULES, *ASYNCHRONOUS_SCHEDULES)
AUTO = "auto"  # the stages are chosen by measuring the model
SYNCS = ("all-reduce", "parameter-server", "async")
ATTENTIONS = ("ring", "all-to-all")  # how the ranks along `context` attend
PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
GRADIENTS = ("fp32", "same")  # the type that gradients are summed in, below float32
RECOMPUTES = ("none", "full", "selective", "sqrt")
CHECKPOINTS = ("whole", "split")  # what tensor ranks keep of a layer's input: each all of it, or its part
UPDATES = ("step", "backward", "last-backward")  # when a unit is updated
OFFLOADS = ("optimizer", "parameters", "activations")
COMPRESSIONS = ("none", "gist", "gist-fp16", "gist-fp10", "gist-fp8")

_LARGEST_BUDGET = 2.0**63  # bytes: more than any memory
_TOO_MANY = 10**6  # ranks, stages or microbatches: rules and schedules look at each


class NumberError(ValueError):
    """Says what a number must be, where the sentence of its field would not explain the refusal."""


@dataclass(frozen=True)
class Field:
    """How one field is read from text or a Python value, and printed again."""

    allowed: str
    read: Callable[[Any], Any]
    show: Callable[[Any], str] = str


def _integer(value: Any, minimum: int) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    number = int(_plain_digits(value))
    if number < minimum:
        raise ValueError
    return number


def _plain_digits(value: Any) -> Any:
    """The value, unless it is text with digits of another script: int('２') is 2."""
    if isinstance(value, str) and any(each.isdecimal() and not each.isascii() for each in value):
        raise NumberError("numbers must be written with the digits 0 to 9")
    return value


def _number_of(value: Any, minimum: int = 1) -> int:
    """How many of something: a number that a person can mean."""
    text = _plain_digits(value)
    is_long = isinstance(text, str) and text.isdecimal() and len(text.lstrip("0")) >= len(str(_TOO_MANY))
    if is_long or _integer(text, minimum) >= _TOO_MANY:
        raise NumberError(f"must be below {_TOO_MANY:,}")
    return int(text)


def _stages(value: Any) -> int | tuple[int, ...] | str:
    """'2' → 2 stages; '3-1' → stages of 3 and 1 replicas; '1-1' is just 2 stages; 'auto' stays."""
    if value == AUTO:
        return AUTO
    if isinstance(value, str) and "-" in value:
        value = value.split("-")
    if not isinstance(value, (list, tuple)):
        return _number_of(value)
    replicas = tuple(_number_of(part) for part in value)
    if len(replicas) < 2:  # replicas of a single stage are what `data` is for
        raise ValueError
    return len(replicas) if set(replicas) == {1} else replicas


def _staleness(value: Any) -> float:
    return math.inf if value in ("inf", math.inf) else _integer(value, 0)


def _switch(value: Any) -> bool:
    return {"true": True, "false": False}[str(value).lower()]


def _recompute(value: Any) -> str:
    text = str(value)
    if text in RECOMPUTES:
        return text
    name, _, size_text = text.partition(":")
    if name != "budget":
        raise ValueError
    size = read_bytes(_plain_digits(size_text))
    if not 1 <= size < _LARGEST_BUDGET:
        raise ValueError
    return f"budget:{round(size)}"


def _offload(value: Any) -> tuple[str, ...]:
    words = value.split(",") if isinstance(value, str) else list(value)
    if words in (["none"], [""]):
        return ()
    if not set(words) <= set(OFFLOADS):
        raise ValueError
    return tuple(word for word in OFFLOADS if word in words)


def _schedule(value: Any) -> str:
    text = str(value)
    # A file is recognised by its form alone: a plan is checked where the file may not exist.
    if text in SCHEDULES or "/" in text or text.endswith(".txt"):
        return text
    raise ValueError


def _words(options: tuple[str, ...]) -> Field:
    def read(value: Any) -> str:
        return options[options.index(str(value))]

    return Field(f"must be one of {', '.join(options)}", read)


def _count() -> Field:
    return Field("must be an integer, at least 1", _number_of)


def _zero_level(value: Any) -> int:
    return (0, 1, 2, 3)[_integer(value, 0)]


def _delay(value: Any) -> int:
    return (0, 1)[_integer(value, 0)]


def _shard(value: Any) -> int:
    ranks = _number_of(value, minimum=0)
    if ranks == 1:  # a group of one rank shards nothing
        raise ValueError
    return ranks


def _show_stages(value: int | tuple[int, ...] | str) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


FIELDS: dict[str, Field] = {
    "data": _count(),
    "tensor": _count(),
    "pipeline": Field(
        "must be a number of stages, at least 1; or the replicas of each stage, like 3-1; or auto",
        _stages,
        _show_stages,
    ),
    "expert": _count(),
    "context": _count(),
    "attention": _words(ATTENTIONS),
    "sync": _words(SYNCS),
    "staleness": Field("must be an integer, at least 0, or inf", _staleness),
    "zero": Field("must be one of 0, 1, 2, 3", _zero_level),
    "shard": Field(
        "must be a number of ranks, at least 2, or 0 for all that hold the same weights",
        _shard,
    ),
    "schedule": Field(f"must be one of {', '.join(SCHEDULES)}, or a file ending in .txt", _schedule),
    "microbatches": _count(),
    "chunks": _count(),
    "sequence": Field("must be true or false", _switch, lambda value: str(value).lower()),
    "compile": Field("must be true or false", _switch, lambda value: str(value).lower()),
    "precision": _words(PRECISIONS),
    "gradients": _words(GRADIENTS),
    "recompute": Field(
        f"must be one of {', '.join(RECOMPUTES)}, or budget:BYTES, like budget:2GiB", _recompute
    ),
    "checkpoints": _words(CHECKPOINTS),
    "contiguous": Field("must be true or false", _switch, lambda value: str(value).lower()),
    "update": _words(UPDATES),
    "masters": Field("must be true or false", _switch, lambda value: str(value).lower()),
    "offload": Field(f"must be any of {', '.join(OFFLOADS)}, joined by commas", _offload, ",".join),
    "delay": Field("must be 0 or 1", _delay),
    "compress": _words(COMPRESSIONS),
    "debug": Field("must be true or false", _switch, lambda value: str(value).lower()),
}
