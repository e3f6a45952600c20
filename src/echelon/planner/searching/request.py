"""A request for a plan: `auto`, and the words that the plan must have.

    auto                            the fastest plan of all that fit
    auto precision=bf16 tensor=1    of those that have these words
    auto memory=100MiB ranks=4      for 4 ranks that hold at most so much

The numerics stay those of a plan without these words: precision is float32 unless the request says another.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

from echelon.errors import UserError, raise_errors
from echelon.plan import AUTO, FIELDS
from echelon.plan.plan import draft, read_words
from echelon.planner.foresight.settings import ADAM, Settings, settings_of
from echelon.quantities import read_bytes

# What a search chooses, of the fields of a plan. The others are as the request says, in every plan.
CHOSEN = (
    *("data", "tensor", "pipeline", "expert", "context"),
    *("zero", "shard", "schedule", "microbatches", "chunks", "sequence"),
    *("recompute", "offload"),
)


def is_request(plan: object) -> bool:
    """Whether a plan is left to the planner: 'auto', 'auto precision=bf16'."""
    return isinstance(plan, str) and plan.split()[:1] == [AUTO]


@final
@dataclass(frozen=True)
class Request:
    """What a plan is chosen from. `words`: the text without `memory` and `ranks`, which are no plan's."""

    words: str = ""
    memory: float | None = None
    ranks: int | None = None
    narrowed: tuple[tuple[str, Any], ...] = ()  # fields that have one value, though the words do not say so
    optimizer: str = ADAM

    @classmethod
    def parse(cls, text: str) -> "Request":
        """Read 'auto', 'auto precision=bf16 memory=100MiB'. A UserError lists every error of the text."""
        words = text.split()[1:] if is_request(text) else text.split()
        own = {name: [word for word in words if word.startswith(f"{name}=")] for name in ("memory", "ranks")}
        errors = [
            f"{name} is given {len(each)} times; give it once" for name, each in own.items() if len(each) > 1
        ]
        limits = {name: each[0].partition("=")[2] for name, each in own.items() if each}
        memory, ranks = _memory(limits.get("memory"), errors), _ranks(limits.get("ranks"), errors)
        limits_given = {word for each in own.values() for word in each}
        request = cls(" ".join(word for word in words if word not in limits_given), memory, ranks)
        try:
            _ = request.base
        except UserError as refusal:
            errors += refusal.errors or [refusal.title]
        raise_errors(f"plan '{text}'", errors)
        return request

    @cached_property
    def values(self) -> dict[str, Any]:
        """The value of each field that the request says."""
        return read_words(self.words)

    @cached_property
    def fixed(self) -> dict[str, Any]:
        """What a search would choose and may not: by the names of `Settings`."""
        fixed = {name: value for name, value in self.values.items() if name in CHOSEN}
        if "offload" in fixed:
            fixed["offload"] = frozenset(fixed["offload"])
        return {**fixed, **dict(self.narrowed)}

    def fixing(self, **values: Any) -> "Request":
        """The same request with fields that have one value alone."""
        return replace(self, narrowed=(*self.narrowed, *values.items()))

    @cached_property
    def base(self) -> Settings:
        """What all plans have in common."""
        return settings_of(draft(self.values), self.optimizer)

    @cached_property
    def others(self) -> str:
        """The words that all plans have, and no search chooses: 'precision=bf16 masters=false'."""
        values = {name: value for name, value in self.values.items() if name not in CHOSEN}
        return " ".join(f"{name}={FIELDS[name].show(value)}" for name, value in values.items())

    def allows(self, settings: Settings, *names: str) -> bool:
        """Whether what `settings` has of these fields is what the request says, where it says something."""
        return all(getattr(settings, name) == self.fixed[name] for name in names if name in self.fixed)


def _memory(text: str | None, errors: list[str]) -> float | None:
    try:
        return None if text is None else read_bytes(text)
    except ValueError as error:
        errors.append(f"memory={text}: {error}")
    return None


def _ranks(text: str | None, errors: list[str]) -> int | None:
    if text is None or (text.isascii() and text.isdecimal() and int(text[:9])):
        return int(text[:9]) if text else None
    errors.append(f"ranks={text}: must be an integer, at least 1")
    return None
