import dataclasses
import functools
import json
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from echelon.engine.step.metrics import Metrics
from echelon.errors import UserError
from echelon.launching import results
from echelon.launching.results import decode, encode
from echelon.update.numbers import Outcome, StepNumbers


class Point(NamedTuple):
    x: float
    name: str


@dataclasses.dataclass(frozen=True)
class Summary:
    loss: float
    points: list[Point]
    steps: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        if type(self.loss) is not float:
            raise AssertionError("no code of a class may run when a result is read")
        object.__setattr__(self, "steps", self.steps + 1)


VALUES: dict[str, Any] = {
    "nothing": None,
    "numbers": [True, 3, -(2**80), 0.1, float("inf")],
    "text": "Grüße \ud800 \n",
    "bytes": [b"", b"\x00\xff"],
    "tuple": ((), (1, (2,)), [3]),
    "dict": {"a": 1, 2: "b", (3, 4): None, None: {}},
    "a dict that looks coded": {"tuple": [1]},
    "ordered": OrderedDict([("z", 1), ("a", 2)]),
    "named tuple": [Point(0.5, "here")],
    "dataclass": {"summary": Summary(0.25, [Point(1.0, "a")])},
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_was(name: str) -> None:
    received = decode(encode(VALUES[name]))
    assert received == VALUES[name]
    assert repr(received) == repr(VALUES[name]), "the types too"


def test_not_a_number_comes_back() -> None:
    assert repr(decode(encode(float("nan")))) == "nan"


SHARED = torch.arange(6.0)
TENSORS = {
    "float64": torch.tensor([0.1, 0.2], dtype=torch.float64),
    "bfloat16": torch.tensor([1.5], dtype=torch.bfloat16),
    "int64": torch.tensor([2**62]),
    "bool": torch.tensor([True, False]),
    "0-dim": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "needs a gradient": torch.ones(2, requires_grad=True),
    "parameter": nn.Parameter(torch.ones(2)),
    "shared": SHARED,
    "shared again": SHARED,
    "shared in part": SHARED[2:4],
}


def test_tensors_come_back_on_the_cpu_and_need_no_gradient() -> None:
    received: dict[str, Tensor] = decode(encode(TENSORS))
    for name, sent in TENSORS.items():
        assert type(received[name]) is Tensor
        assert received[name].dtype == sent.dtype
        assert received[name].shape == sent.shape
        assert torch.equal(received[name], sent), name
        assert not received[name].requires_grad


ARRAYS = {
    "float64": np.array([[0.1, 0.2]]),
    "float16": np.array([1.5], dtype=np.float16),
    "bool": np.array([True, False]),
    "uint64": np.array([2**63], dtype=np.uint64),
    "complex": np.array([1j]),
    "big endian": np.array([1, 2], dtype=">i4"),
    "0-dim": np.array(2.5),
    "empty": np.empty((0, 3)),
    "transposed": np.arange(6.0).reshape(2, 3).T,
    "text": np.array(["a", "Grüße"]),
    "times": np.array(["2020-01-01"], dtype="datetime64[D]"),
}


def test_arrays_come_back_as_they_were() -> None:
    received = decode(encode(ARRAYS))
    for name, sent in ARRAYS.items():
        assert type(received[name]) is np.ndarray
        assert (received[name].dtype, received[name].shape) == (sent.dtype, sent.shape)
        assert np.array_equal(received[name], sent), name
        assert received[name].flags.writeable


@pytest.mark.parametrize(
    "scalar", [np.float64(0.1), np.float32(0.1), np.int64(-3), np.bool_(True), np.str_("a"), np.uint8(200)]
)
def test_scalars_of_numpy_keep_their_type(scalar: np.generic) -> None:
    received = decode(encode({"x": scalar}))["x"]
    assert (type(received), received) == (type(scalar), scalar)


class Plain:
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Plain(), "the result is of type Plain, which cannot be sent: return None"),
        ({"runs": [1, {2, 3}]}, r"the result\['runs'\]\[1\] is of type set"),
        ({Path("a"): 1}, "the key .*'a'.* of the result is of type"),
        (Summary(0.5, [Path("a")]), r"the result.points\[0\] is of type"),  # type: ignore[list-item]
        (torch.eye(2).to_sparse(), "the result is a sparse, quantized or meta tensor"),
        (torch.empty(2, device="meta"), "the result is a sparse, quantized or meta tensor"),
        (lambda: 0, "the result is of type function"),
        ([Point(0.0, Plain())], r"the result\[0\].name is of type Plain"),  # type: ignore[arg-type]
        ({"a": np.array([Plain()])}, r"the result\['a'\] is a numpy array of object, which cannot be sent"),
        (np.ma.masked_array([1]), "the result is of type MaskedArray"),
    ],
)
def test_what_cannot_be_sent_is_named(value: object, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        encode(value)


def test_a_list_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="the result contains itself, or is nested too deep: return None"):
        encode(loop)


def decode_structure(structure: Any, **tensors: Tensor) -> Any:
    """Decode bytes made by hand, as another program could send them."""
    text = json.dumps(structure).encode()
    return decode(len(text).to_bytes(8, "little") + text + save(tensors))


def test_only_classes_of_data_are_looked_up() -> None:
    with pytest.raises(UserError, match="subprocess:Popen"):
        decode_structure({"dataclass": ["subprocess:Popen", {"args": "true"}]})


@pytest.mark.parametrize("kind", ["array", "scalar"])
@pytest.mark.parametrize("dtype", ["|O", "|V8", "f4,O", {"names": ["x"], "formats": ["O"]}, "(2,)f4"])
def test_arrays_of_objects_and_records_are_not_read(kind: str, dtype: object) -> None:
    """The bytes of an array of objects are pointers: whoever sent them would choose what they point to."""
    content = [dtype, [1], "data"]
    with pytest.raises(UserError, match=r"a numpy array of .*, which is not read: run the same code"):
        decode_structure({kind: content}, data=torch.zeros(8, dtype=torch.uint8))


@pytest.mark.parametrize("shape", [[1], [3], [2**62, 4], []])
def test_the_shape_of_an_array_must_fit_its_bytes(shape: list[int]) -> None:
    data = torch.arange(16, dtype=torch.uint8)
    with pytest.raises(UserError, match=r"shape \(.*\), for which 16 bytes do not fit: run the same code"):
        decode_structure({"array": ["<f8", shape, "data"]}, data=data)
    assert decode_structure({"array": ["<f8", [2], "data"]}, data=data).shape == (2,)


def test_an_unknown_kind_is_not_read_as_a_dict() -> None:
    with pytest.raises(UserError, match="content of the unknown kind 'set': run the same code"):
        decode_structure({"set": []})


def test_metrics_are_sent_by_their_values() -> None:
    metrics = Metrics(StepNumbers.known(Outcome(6.0, 2.0, 0.5)), 0.25)
    (received,) = decode(encode([metrics]))
    assert (received.loss, received.grad_norm, received.tokens, received.seconds) == (3.0, 0.5, 2, 0.25)


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
    kind = results.find_class(results.class_name(type(value), "the result"))
    return results.make_dataclass(kind, results.fields_of(value, "the result"))


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
        results.fields_of(value, "the result")


def test_a_named_tuple_with_attributes_is_refused() -> None:
    pair = TaggedPair(1, 2)
    results.refuse_other_attributes(pair, pair._fields, "the result")
    pair.tag = "lost"
    with pytest.raises(TypeError, match="has 'tag', which is no field"):
        results.refuse_other_attributes(pair, pair._fields, "the result")


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
        results.find_class(name)


@pytest.mark.parametrize(
    ("kind", "fields"), [(Slotted, {"y": 1}), (Outer.Inner, {"__class__": Slotted}), (Computed, {"x": 1})]
)
def test_fields_that_a_class_does_not_have_are_refused(kind: type[Any], fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="run the same code"):
        results.make_dataclass(kind, fields)


def test_a_named_tuple_has_as_many_values_as_fields() -> None:
    assert results.make_named_tuple(Pair, [1, 2]) == Pair(1, 2)
    for kind, values in ((Pair, [1]), (Slotted, [1, 2])):
        with pytest.raises(UserError, match="run the same code"):
            results.make_named_tuple(kind, values)


def test_a_class_that_other_ranks_cannot_find_is_refused() -> None:
    class Local(NamedTuple):
        x: int

    with pytest.raises(TypeError, match=r"the result\[0\] is of type .*Local, which other ranks cannot find"):
        results.class_name(Local, "the result[0]")
