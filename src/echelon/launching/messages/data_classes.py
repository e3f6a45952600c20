"""Dataclasses and named tuples by their names and their fields, without a call of any code of theirs.

A name that arrives over a network finds only a class that this process has loaded already, and an object of
it is made from fields alone: no `__init__`, no `__post_init__`, no setter of a property runs.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from types import MemberDescriptorType
from typing import Any

from echelon.errors import UserError


def is_data_class(kind: type[Any]) -> bool:
    return dataclasses.is_dataclass(kind) or is_named_tuple(kind)


def is_named_tuple(kind: type[Any]) -> bool:
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def name_of(kind: type[Any], place: str) -> str:
    """The name by which other ranks find `kind`; `place` is where the object is, for errors."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _loaded_class(name) is not kind:
        raise TypeError(
            f"{place} is of type {kind.__qualname__}, which other ranks cannot find by its name: define the "
            "class at the top level of a module, or in such a class"
        )
    return name


def find(name: str) -> type[Any]:
    """The dataclass or named tuple of this name."""
    kind = _loaded_class(name)
    if kind is None:
        module = name.partition(":")[0]
        raise UserError(
            f"a result of another rank is of type {name}, which this rank has not imported: "
            f"import {module} at the top of the script"
        )
    if not is_data_class(kind):
        raise UserError(f"a result of another rank is of type {name}, which is no dataclass: it is not read")
    return kind


def fields_of(value: Any, place: str) -> dict[str, Any]:
    """The fields of a dataclass that have a value, if they are all there is to it."""
    kind = type(value)
    names = _field_names(kind)
    if _new_object(kind) is None:
        _refuse(
            value, place, "inherits from a built-in type", "return a dataclass that holds the value instead"
        )
    computed = [name for name in names if _runs_code(kind, name)]
    if computed:
        _refuse(value, place, f"computes its field {computed[0]}", "make it a plain field")
    refuse_other_attributes(value, names, place)
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def refuse_other_attributes(value: Any, names: Sequence[str], place: str) -> None:
    """Refuse an object that would arrive without something that it has."""
    # typing adds __orig_class__ to an object that is made by Box[int](…); it only repeats the annotation.
    expected = {*names, "__orig_class__"}
    others = [name for name in getattr(value, "__dict__", {}) if name not in expected]
    lost = [name for name in others if not _is_cache(type(value), name)]
    if lost:
        _refuse(value, place, f"has {lost[0]!r}, which is no field", "declare it: a field(init=False)")


def make_named_tuple(kind: type[Any], values: Sequence[Any]) -> Any:
    if not is_named_tuple(kind) or len(values) != len(kind._fields):
        raise UserError(f"a result of another rank has {len(values)} values for {kind.__qualname__}: {_SAME}")
    return tuple.__new__(kind, values)


def make_dataclass(kind: type[Any], fields: Mapping[str, Any]) -> Any:
    value = _new_object(kind)
    names = _field_names(kind)
    if value is None or any(name not in names or _runs_code(kind, name) for name in fields):
        raise UserError(
            f"a result of another rank has the fields {', '.join(fields)} for {kind.__qualname__}, which has "
            f"{', '.join(names) or 'none'}: {_SAME}"
        )
    for name, content in fields.items():
        object.__setattr__(value, name, content)  # also if it is frozen
    return value


_SAME = "run the same code on every rank"


def _loaded_class(name: str) -> type[Any] | None:
    """The class of a loaded module, or a class inside that, and so on. Reads what is there: a lookup by
    `getattr` could run code of the module."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = None if found is None else vars(found).get(part)
        found = found if isinstance(found, type) else None
    kind: type[Any] | None = found
    return kind


def _field_names(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _new_object(kind: type[Any]) -> Any:
    """An object without values; None for a class that Python cannot make so, like one that is a dict too."""
    try:
        return object.__new__(kind)
    except TypeError:
        return None


def _runs_code(kind: type[Any], name: str) -> bool:
    """Whether setting this field would call something, as of a property. A slot calls nothing."""
    attribute = inspect.getattr_static(kind, name, None)
    return hasattr(type(attribute), "__set__") and not isinstance(attribute, MemberDescriptorType)


def _is_cache(kind: type[Any], name: str) -> bool:
    return isinstance(inspect.getattr_static(kind, name, None), functools.cached_property)


def _refuse(value: Any, place: str, why: str, fix: str) -> None:
    raise TypeError(
        f"{place} is of type {type(value).__qualname__}, which {why}, so its fields are not all of it: {fix}"
    )
