"""What a module's forward takes: how a batch becomes its arguments."""

import inspect
from collections.abc import Collection, Sequence
from inspect import Parameter
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

from echelon.nn.wrapping import replaced_forward

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class CallSignature(NamedTuple):
    """The parameters of a forward, without self; what an engine puts around it counts as nothing."""

    owner: str  # the class
    positional: tuple[str, ...]
    named: tuple[str, ...]
    required: tuple[str, ...]  # of both, those without a default
    any_positional: bool  # *args
    any_named: bool  # **kwargs

    @classmethod
    def of(cls, module: nn.Module) -> "CallSignature":
        name = type(module).__name__
        forward = replaced_forward(module) or MethodType(type(module).forward, module)
        try:
            parameters = inspect.signature(forward).parameters.values()
        except (TypeError, ValueError):  # of a builtin
            return cls(name, (), (), (), any_positional=True, any_named=True)
        listed = [p for p in parameters if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
        return cls(
            name,
            tuple(p.name for p in listed if p.kind in _BY_POSITION),
            tuple(p.name for p in listed if p.kind in _BY_NAME),
            tuple(p.name for p in listed if p.default is Parameter.empty),
            any(p.kind is Parameter.VAR_POSITIONAL for p in parameters),
            any(p.kind is Parameter.VAR_KEYWORD for p in parameters),
        )

    @property
    def takes_one(self) -> bool:
        """Whether just one argument can be given by position."""
        return len(self.positional) == 1 and not self.any_positional

    @property
    def needs_several(self) -> bool:
        """Whether one argument by position is too few."""
        return sum(name in self.required for name in self.positional) > 1

    def errors(self, args: Sequence[Any], names: Collection[str]) -> list[str]:
        """Why a call with these arguments would fail."""
        errors = []
        if len(args) > len(self.positional) and not self.any_positional:
            errors.append(
                f"{len(args)} inputs by position: {self.describe()} takes {len(self.positional)}; give it as "
                "many, or name them in a dict"
            )
        by_position = self.positional[: len(args)]
        twice = [name for name in names if name in by_position]
        unknown = [] if self.any_named else [name for name in names if name not in self.named]
        missing = [name for name in self.required if name not in names and name not in by_position]
        errors += [f"{name}: is given twice, by position and by name; give it once" for name in twice]
        errors += [f"{name}: {self.describe()} does not take it; rename or drop it" for name in unknown]
        errors += [f"{name}: {self.describe()} needs it; add it to the batch" for name in missing]
        return errors

    def describe(self) -> str:
        """'Net.forward(a, b, mask)'."""
        names = dict.fromkeys([*self.positional, *self.named])
        several = ["*args"] * self.any_positional + ["**kwargs"] * self.any_named
        return f"{self.owner}.forward({', '.join([*names, *several])})"
