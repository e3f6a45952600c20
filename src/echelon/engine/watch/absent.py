"""Modules of other stages: the tree of the model has them on every rank, and nobody runs them here.

What their forward would leave in an attribute (an auxiliary loss, a list of them) is not there, and what
there is comes from before the start. Whoever reads it during a step, the loss or a layer of another stage, is
told so:

    first step    the read is noted, and gets that, or zero; all ranks refuse the step before its update
    later         the read raises, and so does that of an attribute which no module ever had
"""

from collections import deque
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon.engine.watch.inside import Inside
from echelon.errors import UserError
from echelon.nn.wrapping import Wrapping
from echelon.parallel.observer import StepObserver
from echelon.plan import Plan

_OWN = frozenset(vars(nn.Module()))  # attributes of every module
_RESULTS = (Tensor, type(None), float, list, dict, set, deque)  # what a forward may leave in an attribute


class AbsentAttributeError(UserError, AttributeError):
    """An attribute of a module of another stage; `hasattr` takes it for one that is not there."""


@final
class AbsentReads(StepObserver):
    """What was read of modules that this rank does not run."""

    def __init__(self, plan: Plan, inside: Inside) -> None:
        self._plan, self.inside = plan, inside
        self._noted: UserError | None = None
        self._is_first = True  # no step was decided on yet

    def read(self, module: nn.Module, attribute: str, value: Any) -> Any:
        """Somebody reads something that is not here, but a value of before; returns what to go on with."""
        error = self.error(module, attribute)
        if not self._is_first:
            raise error
        self._noted = self._noted or error
        return torch.zeros(()) if value is None else value

    def error(self, module: nn.Module, attribute: str) -> "AbsentAttributeError":
        return AbsentAttributeError(
            f"plan '{self._plan}': {_name_of(module)}.{attribute} is read on a rank that does not run this "
            "module, which is of another stage: what its forward leaves there stays on the rank of that "
            "stage; return it from the layer, through the layers behind it, to the loss; or use pipeline=1"
        )

    def call(self, module: nn.Module) -> None:
        if not self.inside:
            raise UserError(
                f"plan '{self._plan}': module {_name_of(module)} is called on a rank that does not hold it, "
                "since it is of another stage; engine.evaluate(batch) runs all stages, and engine.close() "
                "puts the model together on every rank"
            )

    def check_first_step(self) -> None:
        """In the first step, before its update: raise what was noted."""
        if self._noted is not None:
            error, self._noted = self._noted, None
            raise error
        self._is_first = False

    def __deepcopy__(self, _: Any) -> "AbsentReads":
        return self


class AbsentModule:
    """Put before the class of a module of another stage."""

    _echelon_reads: AbsentReads

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if (
            name in _OWN
            or not isinstance(value, _RESULTS)
            or name not in object.__getattribute__(self, "__dict__")
        ):
            return value
        reads = object.__getattribute__(self, "_echelon_reads")
        return value if _leaves_nothing(self) or not reads.inside else reads.read(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """What is no plain attribute: a parameter, a buffer, a module, or nothing."""
        reads: AbsentReads = object.__getattribute__(self, "_echelon_reads")
        try:
            value = super().__getattr__(name)  # type: ignore[misc]
        except AttributeError as error:
            if reads.inside and not name.startswith("__"):
                raise reads.error(self, name) from error  # type: ignore[arg-type]  # hasattr may ask
            raise
        if value is not None or _leaves_nothing(self) or not reads.inside:
            return value
        return reads.read(self, name, None)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is of the module's own class."""
        reduced: Any = super().__reduce_ex__(protocol)
        _, arguments, *state = reduced
        kinds = tuple(type(self).__mro__[2] if each is type(self) else each for each in arguments)
        return (_make, kinds, *state)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._echelon_reads.call(self)  # type: ignore[arg-type]
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


def mark_absent(modules: dict[str, nn.Module], reads: AbsentReads, wrapping: Wrapping) -> None:
    """Watch these modules, which this rank does not run."""
    for name, module in modules.items():
        kind = type(module)
        content = {"_echelon_reads": reads, "_echelon_name": name, "__module__": kind.__module__}
        absent = type(kind.__name__, (AbsentModule, kind), content)
        wrapping.assign(module, "__class__", absent)


def _make(kind: type, *arguments: Any) -> Any:
    """As copyreg's, which pickle takes only for objects of the very class."""
    return kind.__new__(kind, *arguments)


def _leaves_nothing(module: object) -> bool:
    """Whether its class is torch's or echelon's own: the forward of these leaves no result in an attribute,
    and the engine reads what there is."""
    return type(module).__mro__[2].__module__.startswith(("torch.", "echelon."))


def _name_of(module: nn.Module) -> str:
    return str(object.__getattribute__(module, "_echelon_name"))
