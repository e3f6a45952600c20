"""All that a recording has read from Python: a replay does not read it again, so a change must be seen.

    model.temperature = 0.5, model.eval(), a new hook      attributes, modes and hooks of modules
    loss.weights["rare"] = 2.0, config.scale = 3            what models and losses reach from there
    nonlocal factor, global factor                          cells of closures, globals that the code names
    weight.data = …, weight.requires_grad_(False)           addresses of parameters and buffers

Values of tensors are no constants: a replay reads what they hold then. Objects are compared by identity, and
plain numbers and texts by value: no code of the user's is called, and no device is read. What code reads in
another way (a file, the clock, attributes of a library's module) is not seen here; comparisons of gradients
find it (graphed_passes.py).
"""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import is_
from types import CodeType, FunctionType, MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

_PLAIN = (int, float, bool, str, bytes)
_MOST_OWNERS = 2_000  # beside modules: containers, objects and functions
_STRUCTURE = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MEMBERS = (*_STRUCTURE, *_HOOKS)
_OF_EACH_MODULE = frozenset(vars(nn.Module()))  # beside what the user's class adds
_LEFT_OUT = ("torch", "echelon", "builtins", "typing", "collections", "functools", "enum", "logging", "abc")

Read = Callable[[], Sequence[object]]


class TooManyOwnersError(Exception):
    """Models and losses reach more objects than can be compared in each step."""


@final
class Constants:
    """What there is now, to be compared with what there is later."""

    def __init__(self, modules: Iterable[nn.Module], values: Iterable[Any] = ()) -> None:
        """`modules`: all of a model; `values`: its loss, and other functions that passes call."""
        self._modules = list(modules)
        names = {id(each): _name_of(each) for each in self._modules}
        self._owners: list[tuple[str, Read]] = [
            (names[id(each)], partial(_of_module, each)) for each in self._modules
        ]
        self._owners.append(("torch.nn.modules.module", _of_all_modules))
        self._owners += _search(self._modules, values)
        self._tensors = [t for each in self._modules for t in _own_tensors(each)]
        self.record()

    def record(self) -> None:
        """Take what there is now for what must stay. The objects are kept, so that none gets the identity of
        another."""
        self._known = [read() for _, read in self._owners]
        self._memory = self._read_memory()

    def changed(self) -> str | None:
        """Name one owner that is not as it was, if any."""
        for (name, read), known in zip(self._owners, self._known, strict=True):
            now = read()
            if len(now) != len(known) or not (all(map(is_, now, known)) or all(map(_is_same, now, known))):
                return name
        if self._read_memory() != self._memory:
            return "the memory of weights or buffers"
        return None

    def _read_memory(self) -> list[tuple[int, bool]]:
        with torch._C.DisableTorchFunctionSubclass():
            return [(tensor.data_ptr(), tensor.requires_grad) for tensor in self._tensors]


def _is_same(now: object, before: object) -> bool:
    is_plain = type(now) in _PLAIN and type(now) is type(before)
    return now is before or (is_plain and bool(now == before))


def _name_of(module: nn.Module) -> str:
    return f"a {type(module).__name__}"


def _of_module(module: nn.Module) -> list[object]:
    """List the attributes of a module, its tensors, children and hooks."""
    entries = vars(module)
    found = list(entries.values())
    for kind in _MEMBERS:
        if entries[kind]:
            found += entries[kind].values()
    for parameter in entries["_parameters"].values():
        if parameter is not None:
            for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
                found += (hooks or {}).values()
    return found


def _of_all_modules() -> list[object]:
    return [hook for kind in _HOOKS for hook in getattr(torch_module, f"_global{kind}").values()]


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor


# What models and losses reach: containers, objects of the user's and of libraries' classes, functions.


def _search(modules: Sequence[nn.Module], values: Iterable[Any]) -> list[tuple[str, Read]]:
    seen = {id(module) for module in modules}
    found: list[tuple[str, Read]] = []
    waiting: deque[tuple[str, Any]] = deque()
    for module in modules:
        plain = {key: value for key, value in vars(module).items() if key not in _OF_EACH_MODULE}
        waiting += [(f"{key} of {_name_of(module)}", value) for key, value in plain.items()]
        waiting.append((type(module).__name__, type(module).forward))
    waiting += [(getattr(value, "__name__", type(value).__name__), value) for value in values]
    kept: list[Any] = []  # so that no identity is given away while the search goes on
    while waiting:
        name, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kept.append(value)
        read = _reader(value)
        members = value if isinstance(value, tuple | frozenset) else () if read is None else read()
        waiting += [(name, member) for member in members]
        if read is not None:
            found.append((name, read))
        if len(found) > _MOST_OWNERS:
            raise TooManyOwnersError
    return found


def _reader(value: Any) -> Read | None:
    """Return a function that lists what a value holds, if it may hold something else later."""
    kind = type(value)
    if kind in (*_PLAIN, type(None)) or isinstance(value, Tensor | type):
        return None
    if isinstance(value, FunctionType):
        return None if _is_left_out(value.__module__) else partial(_of_function, value)
    if isinstance(value, MethodType):
        return lambda: (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        return lambda: (value.func, *value.args, *value.keywords.values())
    if isinstance(value, nn.Module):  # of a loss
        return partial(_of_module, value)
    if isinstance(value, dict):
        return lambda: (*value.keys(), *value.values())
    if isinstance(value, list | deque | set):
        return lambda: tuple(value)
    if _is_left_out(kind.__module__) or not hasattr(value, "__dict__"):
        return None
    return lambda: tuple(vars(value).values())


def _is_left_out(module: str | None) -> bool:
    return (module or "builtins").partition(".")[0] in _LEFT_OUT


def _of_function(function: FunctionType) -> list[object]:
    """List the contents of a function's closure, its defaults, and the globals that its code names."""
    values: list[object] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # empty
            values.append(None)
    named = (function.__globals__.get(name) for name in _names(function.__code__))
    return [*values, *(value for value in named if not _is_library(value))]


def _is_library(value: Any) -> bool:
    return type(value).__name__ == "module" or isinstance(value, type)


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return (*code.co_names, *chain.from_iterable(map(_names, inner)))
