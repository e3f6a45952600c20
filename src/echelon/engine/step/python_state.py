"""What user code keeps in Python: attributes of modules, and all that modules and losses reach from there.

    self.calls, self.history, self.helper.mean     attributes, containers, objects of the user's classes
    nonlocal count, global count                   cells of closures, globals that the code names
    gen = torch.Generator()                        generators

Functions and classes of installed packages are not searched, and of other engines nothing is.
"""

import functools
import sys
import sysconfig
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from functools import lru_cache, partial
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, final

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from echelon.nn.autograd.generators import generator_restorer
from echelon.parallel.own_loss import ObjectiveLoss

_BYTES = 64 * 2**20  # of all tensors and arrays that are copied
_ITEMS = 100_000  # of all containers, objects and functions that are searched
_STRUCTURE = frozenset({"_parameters", "_buffers", "_modules"})  # what modules hold beside plain attributes
_SEQUENCES = (list, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_FUNCTIONS = (FunctionType, MethodType, BuiltinMethodType, functools.partial)
_NUMBERS = (int, float, bool)


@final
class PythonState:
    """Copies at once; `restore` puts everything back."""

    def __init__(self, modules: Iterable[nn.Module], *values: Any) -> None:
        """Of `modules` (a model, say) the attributes are kept, not buffers and children; of `values`, all."""
        self._undo: list[Callable[[], object]] = []
        self._bytes_left, self._items_left = _BYTES, _ITEMS
        modules = list(modules)
        self._seen: dict[int, Any] = {id(module): module for module in modules}
        self._tensors: list[Tensor | numpy.ndarray[Any, Any]] = []
        for module in modules:
            self._keep_entries(vars(module), _STRUCTURE)
            self._search_class(type(module))
        for value in values:
            self._visit(value)

    def leave_out(self, values: Iterable[Any]) -> None:
        """Do not search these when they are reached."""
        self._seen |= {id(value): value for value in values}

    def reach(self, value: Any) -> list[Tensor]:
        """Keep this too; return tensors, and the tensors of arrays, which nothing has reached before."""
        self._tensors = []
        self._visit(value)
        return [each if isinstance(each, Tensor) else _tensor_of(each) for each in self._tensors]

    @torch.no_grad()
    def restore(self) -> None:
        for undo in self._undo:
            undo()

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if kind in (*_NUMBERS, str, type(None)) or id(value) in self._seen or self._items_left <= 0:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor | numpy.ndarray):
            self._tensors.append(value)
            if _is_copied(value):
                self._copy(value)
        elif kind in (*_SEQUENCES, *_MAPPINGS, set) or isinstance(value, tuple):
            self._copy_container(value)
        elif (restore := generator_restorer(value)) is not None:
            self._undo.append(restore)
        elif isinstance(value, _FUNCTIONS):
            self._search_function(value)
        elif isinstance(value, type):
            self._search_class(value)
        elif isinstance(value, nn.Module):  # of a loss, say
            self._keep_entries(vars(value), frozenset({"_parameters"}))
            self._search_class(kind)
        elif _is_users(kind.__module__) or kind in (SimpleNamespace, ObjectiveLoss) or _is_made(kind):
            self._keep_entries(getattr(value, "__dict__", {}), frozenset())
            self._search_class(kind)

    def _copy(self, value: Any) -> None:
        if value.nbytes <= self._bytes_left:
            self._bytes_left -= value.nbytes
            copy = value.detach().clone() if isinstance(value, Tensor) else value.copy()
            self._undo.append(partial(_put_back, value, copy))

    def _copy_container(self, value: Any) -> None:
        if len(value) > self._items_left:
            return
        self._items_left -= len(value) + 1
        is_mapping = type(value) in _MAPPINGS
        if not isinstance(value, tuple):
            self._undo.append(partial(_put_back, value, dict(value) if is_mapping else list(value)))
        for member in list(value.values()) if is_mapping else list(value):
            self._visit(member)

    def _keep_entries(self, entries: dict[str, Any], left_out: frozenset[str]) -> None:
        before = {name: value for name, value in entries.items() if name not in left_out}
        self._items_left -= len(before)
        self._undo.append(partial(_restore_entries, entries, before, left_out))
        for value in before.values():
            self._visit(value)

    def _search_function(self, value: Any) -> None:
        self._items_left -= 1
        if isinstance(value, functools.partial):
            for each in (value.func, value.args, value.keywords):
                self._visit(each)
        elif isinstance(value, MethodType | BuiltinMethodType):
            self._visit(value.__self__)
            self._visit(getattr(value, "__func__", None))
        elif _is_users(value.__module__):
            self._visit(value.__defaults__)
            for cell in value.__closure__ or ():
                self._keep_cell(cell)
            for name in _names(value.__code__):
                if name in value.__globals__:
                    content = value.__globals__[name]
                    self._undo.append(partial(value.__globals__.__setitem__, name, content))
                    self._visit(content)

    def _keep_cell(self, cell: CellType) -> None:
        try:
            content = cell.cell_contents
        except ValueError:  # empty
            return
        self._undo.append(partial(setattr, cell, "cell_contents", content))
        self._visit(content)

    def _search_class(self, kind: type) -> None:
        for each in kind.__mro__:
            if not _is_users(each.__module__) or (id(each) in self._seen and each is not kind):
                continue
            self._seen[id(each)] = each
            for name, value in list(vars(each).items()):
                if type(value) in _NUMBERS:
                    self._undo.append(partial(_set_of_class, each, name, value))
                else:
                    self._visit(getattr(value, "__func__", value))


@lru_cache(maxsize=4096)
def _is_users(module: str | None) -> bool:
    """Return whether a module is no part of Python, of an installed package, or of echelon."""
    root = (module or "").partition(".")[0]
    if root != "__main__" and (root in {"", "echelon", "builtins"} or root in sys.stdlib_module_names):
        return False
    file = str(getattr(sys.modules.get(root), "__file__", None) or "")
    return not file.startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    return (
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        str(torch.__file__).rpartition("torch")[0],
    )


def _is_made(kind: type) -> bool:
    """Return whether a class was made by a function: by dataclasses.make_dataclass."""
    return kind.__module__ == "types" and is_dataclass(kind)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _set_of_class(kind: type, name: str, value: Any) -> None:
    if kind.__dict__.get(name) is not value:
        setattr(kind, name, value)


def _is_copied(value: Any) -> bool:
    """Return whether its values can be copied, and written again."""
    if type(value) is numpy.ndarray:
        return bool(value.flags.writeable) and not value.dtype.hasobject
    if type(value) is not Tensor or value.layout != torch.strided or value.is_meta or value.is_inference():
        return False
    is_expanded = any(step == 0 and size > 1 for step, size in zip(value.stride(), value.shape, strict=True))
    return not is_expanded


def _tensor_of(array: "numpy.ndarray[Any, Any]") -> Tensor:
    """Return one in the memory of an array, if torch has its type."""
    try:
        with warnings.catch_warnings(action="ignore"):  # that it may be written to
            return torch.from_numpy(array)
    except (TypeError, ValueError):
        return torch.empty(0)


def _put_back(value: Any, copy: Any) -> None:
    if isinstance(value, Tensor):
        if value.shape != copy.shape or value.dtype != copy.dtype:
            value.data = copy
            return
        with _unsafe_preserve_version_counter(value):
            value.copy_(copy)
    elif isinstance(value, numpy.ndarray):
        value[...] = copy
    elif type(value) in _SEQUENCES:
        value.clear()
        value.extend(copy)
    else:
        value.clear()
        value.update(copy)


def _restore_entries(entries: dict[str, Any], before: dict[str, Any], left_out: frozenset[str]) -> None:
    for name in [name for name in entries if name not in before and name not in left_out]:
        del entries[name]
    for name, value in before.items():
        if entries.get(name, _STRUCTURE) is not value:
            entries[name] = value
