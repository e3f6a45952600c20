"""What user code keeps in Python comes back, wherever modules and losses reach it."""

from collections.abc import Callable
from dataclasses import make_dataclass
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from echelon.engine.step.python_state import PythonState

CALLS = {"total": 0}
number_of_calls = 0
GENERATOR = torch.Generator().manual_seed(1)


class Meter:
    """An object of a user's class."""

    made = 0

    def __init__(self) -> None:
        self.mean, self.rows, self.array = 0.0, torch.zeros(2), numpy.zeros(2)

    def __call__(self, value: float) -> None:
        self.mean += value
        self.rows += value
        self.array += value
        Meter.made += 1

    def read(self) -> Any:
        return self.mean, self.rows.tolist(), self.array.tolist(), Meter.made


class Holder(nn.Module):
    """A model with a meter and a loss module behind an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.meter, self.history = Meter(), [1]
        self.register_forward_hook(lambda *_: self.meter(0.5))

    def forward(self, values: Tensor) -> Tensor:
        global number_of_calls
        number_of_calls += 1
        CALLS["total"] += 1
        self.history.append(2)
        return values * (1 + 0 * torch.rand((), generator=GENERATOR))


class Centre(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))
        self.calls = 0

    def forward(self, output: Tensor, _: Tensor) -> Tensor:
        self.calls += 1
        self.centre += 1
        return output.sum()


def counting() -> tuple[Callable[..., Any], Callable[[], Any]]:
    count, meter = 0, Meter()

    def loss(output: Tensor, _: Tensor) -> Tensor:
        nonlocal count
        count += 1
        meter(1.0)
        return output.sum()

    return loss, lambda: (count, meter.read())


def centring() -> tuple[Callable[..., Any], Callable[[], Any]]:
    centre = Centre()
    return centre, lambda: (centre.calls, centre.centre.tolist())


def bound() -> tuple[Callable[..., Any], Callable[[], Any]]:
    centre = Centre()
    return centre.forward, lambda: (centre.calls, centre.centre.tolist())


def partly() -> tuple[Callable[..., Any], Callable[[], Any]]:
    meter = Meter()

    def loss(meter: Meter, output: Tensor, _: Tensor) -> Tensor:
        meter(2.0)
        return output.sum()

    return partial(loss, meter), meter.read


@pytest.mark.parametrize("make", [counting, centring, bound, partly])
def test_what_a_loss_keeps_comes_back(make: Callable[[], Any]) -> None:
    loss, read = make()
    before = read()
    state = PythonState((), loss)
    loss(torch.ones(2), torch.ones(2))
    assert read() != before
    state.restore()
    assert read() == before


def test_what_a_model_reaches_comes_back() -> None:
    model = Holder()

    def read() -> Any:
        drawn = GENERATOR.get_state().tolist()
        return model.meter.read(), list(model.history), number_of_calls, dict(CALLS), drawn

    before = read()
    state = PythonState(model.modules())
    model(torch.ones(2))
    after = read()
    assert all(one != other for one, other in zip(before, after, strict=True))
    state.restore()
    assert read() == before


def test_another_object_in_an_attribute_is_dropped() -> None:
    model = Holder()
    meter, state = model.meter, PythonState(model.modules())
    model.meter, model.other = Meter(), 1
    state.restore()
    assert model.meter is meter
    assert not hasattr(model, "other")


def test_what_belongs_to_the_engine_or_a_package_is_left_alone() -> None:
    other = nn.Linear(2, 2)
    state = PythonState((), lambda: (other.weight, torch.nn))
    with torch.no_grad():
        other.weight.fill_(3)
    state.restore()
    assert other.weight.eq(3).all(), "weights are no state of a loss"


def test_tensors_are_found_in_functions_objects_and_arrays() -> None:
    matrix = torch.arange(4.0)
    array = matrix.numpy()
    kept = [lambda: matrix, partial(torch.add, matrix), matrix.add, make_dataclass("D", ["m"])(matrix)]
    for value in (*kept, (matrix,), lambda: array):
        (tensor,) = PythonState(()).reach(value)
        assert tensor.data_ptr() == matrix.data_ptr()
    state = PythonState(())
    state.leave_out([kept[0]])
    (tensor,) = state.reach(kept)
    assert tensor is matrix, "each once"
    assert state.reach(numpy.zeros(1, dtype=object))[0].numel() == 0
