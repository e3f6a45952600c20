import dataclasses
import functools
import sys
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

import pytest

from echelon.errors import UserError
from echelon.launching.messages import data_classes

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: int
    unset: int = dataclasses.field(init=False)


class Outer:
    @dataclasses.dataclass
    class Inner:
        x: int
        total: int = dataclasses.field(init=False)

        def __post_init__(self) -> None:
            self.total = self.x + 1

        @functools.cached_property
        def double(self) -> int:
            return 2 * self.x

    not_a_class = Inner(1)


class Pair(NamedTuple):
    first: int
    second: int


class TaggedPair(Pair):
    pass


@dataclasses.dataclass
class Computed:
    x: int

    @property  # type: ignore[no-redef]
    def x(self) -> int:
        return self._x

    @x.setter
    def x(self, _: int) -> None:
        raise AssertionError("no code of a class may run when a result is read")


@dataclasses.dataclass
class Box(Generic[T]):
    content: T


@dataclasses.dataclass
class Table(dict[str, int]):
    x: int = 0


@dataclasses.dataclass
class Later:
    x: int

    def __post_init__(self) -> None:
        self.extra = self.x


def make(value: Any) -> Any:
    """What `value` becomes elsewhere."""
    kind = data_classes.find(data_classes.name_of(type(value), "the result"))
    return data_classes.make_dataclass(kind, data_classes.fields_of(value, "the result"))


def test_a_dataclass_is_made_of_its_fields() -> None:
    slotted = make(Slotted(3))
    assert (type(slotted), slotted.x, hasattr(slotted, "unset")) == (Slotted, 3, False)
    inner = Outer.Inner(4)
    assert inner.double == 8, "a cached property is no loss: it is computed again"
    assert (make(inner), make(inner).double) == (inner, 8)


def test_an_object_of_a_generic_dataclass_may_name_its_types() -> None:
    """It has the attribute __orig_class__, which is no field, and was refused for it."""
    box = Box[int](1)
    assert "__orig_class__" in vars(box)
    assert make(box) == Box(1)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Table(), "the result is of type Table, which inherits from a built-in type"),
        (Later(1), "the result is of type Later, which has 'extra', which is no field"),
        (Computed.__new__(Computed), "the result is of type Computed, which computes its field x"),
    ],
)
def test_an_object_that_is_more_than_its_fields_is_refused(value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        data_classes.fields_of(value, "the result")


def test_a_named_tuple_with_attributes_is_refused() -> None:
    pair = TaggedPair(1, 2)
    data_classes.refuse_other_attributes(pair, pair._fields, "the result")
    pair.tag = "lost"
    with pytest.raises(TypeError, match="has 'tag', which is no field"):
        data_classes.refuse_other_attributes(pair, pair._fields, "the result")


class Lazy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise AssertionError("no code of a module may run when a result is read")


@pytest.mark.parametrize(
    "name",
    [
        "subprocess:Popen",
        "ast:Name",  # has _fields too
        "os:system",
        f"{__name__}:Outer.not_a_class.__class__",
        f"{__name__}:sys.modules",
        f"{__name__}:Outer",
        f"{__name__}:Slotted.x",
        "a_lazy_module:Anything",
        "no_such_module:Slotted",
        "subprocess:",
    ],
)
def test_only_loaded_dataclasses_and_named_tuples_are_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "a_lazy_module", Lazy("a_lazy_module"))
    with pytest.raises(UserError, match="a result of another rank is of type"):
        data_classes.find(name)


@pytest.mark.parametrize(
    ("kind", "fields"), [(Slotted, {"y": 1}), (Outer.Inner, {"__class__": Slotted}), (Computed, {"x": 1})]
)
def test_fields_that_a_class_does_not_have_are_refused(kind: type[Any], fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="run the same code on every rank"):
        data_classes.make_dataclass(kind, fields)


def test_a_named_tuple_has_as_many_values_as_fields() -> None:
    assert data_classes.make_named_tuple(Pair, [1, 2]) == Pair(1, 2)
    for kind, values in ((Pair, [1]), (Slotted, [1, 2])):
        with pytest.raises(UserError, match="run the same code on every rank"):
            data_classes.make_named_tuple(kind, values)


def test_a_class_that_other_ranks_cannot_find_is_refused() -> None:
    class Local(NamedTuple):
        x: int

    with pytest.raises(TypeError, match=r"the result\[0\] is of type .*Local, which other ranks cannot find"):
        data_classes.name_of(Local, "the result[0]")
