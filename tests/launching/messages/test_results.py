import dataclasses
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from echelon.engine.step.metrics import Metrics
from echelon.errors import UserError
from echelon.launching.messages.results import decode, encode
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
