import copy
import dataclasses
import json
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from echelon.engine.metrics import Metrics
from echelon.errors import UserError
from echelon.launching.results import RemoteResult, decode, encode
from echelon.runtime import Outcome, StepNumbers


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
    ],
)
def test_what_cannot_be_sent_is_named(value: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        encode(value)


def test_a_class_that_other_ranks_cannot_find_is_refused() -> None:
    class Local(NamedTuple):
        x: int

    with pytest.raises(UserError, match="Local, which other ranks cannot find: define the class at the top"):
        encode(Local(1))


def test_only_classes_of_data_are_looked_up() -> None:
    text = json.dumps({"dataclass": ["subprocess:Popen", {"args": "true"}]}).encode()
    data = len(text).to_bytes(8, "little") + text + encode(None)[12:]
    with pytest.raises(UserError, match="subprocess:Popen"):
        decode(data)


def test_the_result_of_another_rank_says_where_it_is() -> None:
    remote: Any = RemoteResult(2)
    assert repr([remote]) == "[<the result of rank 2: only rank 0 has it>]"
    with pytest.raises(AttributeError, match="no 'loss' here: use it on rank 0"):
        _ = remote.loss
    with pytest.raises(UserError, match="neither true nor false"):
        bool(remote)
    with pytest.raises(TypeError):
        float(remote)
    assert copy.copy(remote) == pickle.loads(pickle.dumps(remote)) == remote


def test_metrics_are_sent_by_their_values() -> None:
    metrics = Metrics(StepNumbers.known(Outcome(6.0, 2.0, 0.5)), 0.25)
    (received,) = decode(encode([metrics]))
    assert (received.loss, received.grad_norm, received.tokens, received.seconds) == (3.0, 0.5, 2, 0.25)
