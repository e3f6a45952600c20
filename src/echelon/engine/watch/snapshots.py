"""Snapshots of a model, taken after a step and compared before the next: its structure, its weights and
gradients.

A snapshot reads Python objects, and no value of a tensor. Two are compared in each step; names are searched
only where they differ.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from echelon.errors import UserError
from echelon.nn.wrapping import is_wrapped
from echelon.parallel.data.zero.weight_access import FreedParameter

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_MODULE, _OF_TENSOR = itemgetter(*_HOOKS), attrgetter(*_TENSOR_HOOKS)
_GLOBAL_HOOKS = tuple(getattr(torch_module, f"_global{name}") for name in _HOOKS)


class Snapshot(NamedTuple):
    """All modules, in one row each: what is empty in most of them costs little."""

    children: list[nn.Module | None]
    parameters: list[int]  # ids
    hooks: list[int]  # the numbers of handles, which are never used again
    forwards: list[object]  # that a module has instead of its class's
    class_forwards: list[object]


class _Details(NamedTuple):
    """The same by module, to name what has changed."""

    children: list[tuple[nn.Module | None, ...]]
    parameters: list[tuple[int, ...]]
    owners: dict[int, str]  # of hooks


class Change(NamedTuple):
    """A change of a module, in words."""

    kind: str  # a field of Snapshot, or "weight hooks", which only ranks with the weight can have
    text: str


@final
class Structure:
    """The modules of a model and of its stages, and how they were at the last record."""

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        """`names`: of all modules."""
        self._names = names
        self.modules = list(names)
        self._variables = list(map(vars, self.modules))  # a snapshot asks each module for eight of them
        self._classes = list(dict.fromkeys(map(type, self.modules)))
        self._snapshot, self._details = self._take(), self._read_details()

    def record(self) -> None:
        """Take what there is now for what must stay."""
        before, self._snapshot = self._snapshot, self._take()
        if before != self._snapshot:
            self._details = self._read_details()

    def changes(self) -> list[Change]:
        """List what has changed since the last record."""
        now = self._take()
        if now == self._snapshot:
            return []
        details = self._read_details()
        return [*self._changes_by_module(now, details), *self._hook_changes(now, details)]

    def _take(self) -> Snapshot:
        variables = self._variables
        parameters = [each for own in variables for each in own["_parameters"].values()]
        with torch._C.DisableTorchFunctionSubclass():  # a freed parameter need not be asked
            of_tensors = [_OF_TENSOR(each) for each in parameters if each is not None]
        hooks = filter(None, chain(_GLOBAL_HOOKS, *map(_OF_MODULE, variables), *of_tensors))
        return Snapshot(
            [child for own in variables for child in own["_modules"].values()],
            list(map(id, parameters)),
            list(chain.from_iterable(hooks)),
            [own.get("forward") for own in variables],
            [getattr(kind, "forward", None) for kind in self._classes],
        )

    def _read_details(self) -> _Details:
        return _Details(
            [tuple(module._modules.values()) for module in self.modules],
            [tuple(map(id, module._parameters.values())) for module in self.modules],
            {number: owner for owner, numbers in self._hooked() for number in numbers},
        )

    def _hooked(self) -> Iterator[tuple[str, list[int]]]:
        """Yield each owner of hooks, with their numbers."""
        yield "all modules (torch.nn.modules.module)", [*chain.from_iterable(_GLOBAL_HOOKS)]
        with torch._C.DisableTorchFunctionSubclass():
            for module, name in self._names.items():
                yield f"module {name}", [*chain.from_iterable(getattr(module, hooks) for hooks in _HOOKS)]
                for key, p in module._parameters.items():
                    if p is not None:
                        hooks = [*(p._backward_hooks or ()), *(p._post_accumulate_grad_hooks or ())]
                        yield f"{name}.{key}", hooks

    def _hook_changes(self, now: Snapshot, details: _Details) -> Iterator[Change]:
        before = self._snapshot.hooks
        for number in sorted(set(now.hooks) - set(before)):
            owner = details.owners[number]
            yield Change(_kind_of_hook(owner), f"{owner} has got a hook")
        for number in sorted(set(before) - set(now.hooks)):
            owner = self._details.owners[number]
            yield Change(_kind_of_hook(owner), f"{owner} has lost a hook")

    def _changes_by_module(self, now: Snapshot, details: _Details) -> Iterator[Change]:
        before, old = self._snapshot, self._details
        others = {
            kind
            for kind, one, other in zip(self._classes, before.class_forwards, now.class_forwards, strict=True)
            if one != other
        }
        for place, (module, name) in enumerate(self._names.items()):
            if _differ(old.children[place], details.children[place]):
                yield Change("children", f"module {name} has other modules in it")
            if old.parameters[place] != details.parameters[place]:
                other = self._other_parameter(place, name)
                yield Change("parameters", f"{other} is another Parameter object")
            if before.forwards[place] != now.forwards[place]:
                kind = "children" if is_wrapped(module) or _is_wrapper(before.forwards[place]) else "forwards"
                yield Change(kind, f"module {name} has got another forward")
            if type(module) in others:
                yield Change("forwards", f"module {name} ({type(module).__name__}) has got another forward")

    def _other_parameter(self, place: int, name: str) -> str:
        module, known = self.modules[place], set(self._details.parameters[place])
        new = [key for key, p in module._parameters.items() if id(p) not in known]
        return f"{name}.{new[0]}" if new else name


def _kind_of_hook(owner: str) -> str:
    return "hooks" if owner.startswith(("module ", "all modules ")) else "weight hooks"


def _differ(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) != len(other) or any(a is not b for a, b in zip(one, other, strict=True))


def _is_wrapper(forward: object) -> bool:
    return str(getattr(type(getattr(forward, "__self__", None)), "__module__", "")).startswith("echelon.")


# Weights that the user changes by hand are found by version and address:
#
#     in place            weight.clamp_(…), load_state_dict, weight.data.clamp_(…)      its version is another
#     other memory        weight.data = tensor                                          its address is another
#
# The model's weights are then what the user wrote. What the engine keeps beside them (flat shards, float32
# masters, twins in host memory) takes the new values: masters those of elements that are others now.


class _State(NamedTuple):
    """Versions and addresses of the weights that are whole between steps."""

    versions: list[int]
    addresses: list[int]


@final
class WeightWatch:
    """Compares the weights of this rank with what they were after the last step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._forms = {name: (p.shape, p.dtype, p.device) for name, p in parameters.items()}
        self.record()

    def record(self) -> None:
        """Take the weights of now for those that the engine has made. What moves a weight between steps
        watches it."""
        self._whole = {n: p for n, p in self._parameters.items() if p.__class__ is not FreedParameter}
        self._state = self._read()

    def _read(self) -> _State:
        weights = self._whole.values()
        with torch._C.DisableTorchFunctionSubclass():  # some may have been freed since
            return _State([p._version for p in weights], [p.data_ptr() for p in weights])

    def changed(self) -> dict[str, nn.Parameter]:
        """Return the weights that were changed since the last record, by name."""
        now = self._read()
        if now == self._state:
            return {}
        pairs = zip(zip(*now, strict=True), zip(*self._state, strict=True), self._whole.items(), strict=True)
        return {name: p for new, old, (name, p) in pairs if new != old}

    def check_forms(self, names: Iterable[str]) -> None:
        """Refuse memory of another form."""
        for name in names:
            parameter = self._parameters[name]
            form = (parameter.shape, parameter.dtype, parameter.device)
            if form != self._forms[name]:
                shape, dtype, device = self._forms[name]
                raise UserError(
                    f"{name} is {tuple(parameter.shape)} of {parameter.dtype} on {parameter.device} now, "
                    f"and parallelize was given {tuple(shape)} of {dtype} on {device}; give it that form"
                )


# Gradients that add up until an update. A backward pass of the user's own adds to them where no hook hears
# of it; versions and addresses tell.

_GRAD: Any = Tensor.grad  # the descriptor of torch's class, which lost gradients do not hide


@final
class GradientWatch:
    """Sees whether gradients were changed between two calls of an engine, while they wait for an update."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._is_on, self._is_changed = False, False
        self._state: list[tuple[int, int] | None] = []

    @property
    def is_on(self) -> bool:
        return self._is_on

    @is_on.setter
    def is_on(self, value: bool) -> None:
        if value != self._is_on:
            self._is_on, self._is_changed = value, False
            self.record()

    def record(self) -> None:
        if self._is_on:
            self._state = self._read()

    def look(self) -> bool:
        """Return whether any was changed since gradients wait."""
        self._is_changed |= self._is_on and self._read() != self._state
        return self._is_changed

    def _read(self) -> list[tuple[int, int] | None]:
        with torch._C.DisableTorchFunctionSubclass():
            gradients = [_GRAD.__get__(parameter) for parameter in self._parameters]
            return [None if each is None else (each.data_ptr(), each._version) for each in gradients]
