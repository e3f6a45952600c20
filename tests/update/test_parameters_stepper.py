"""Weights in host memory are updated unit by unit, by another stepper."""

from typing import Any

import pytest
import torch
from torch import nn

from echelon.errors import UserError
from echelon.update.parameters_stepper import ParametersStepper


class Inner:
    """Notes what is asked of it, and answers by name."""

    whole_parts = frozenset({"row_var"})

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.by_unit, self.calls = optimizer, False, list[Any]()

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.calls.append((name, *given)) or name


class Sharing:
    def __init__(self, *units: str) -> None:
        self._units = units

    def pieces_to_update(self) -> tuple[str, ...]:
        return self._units


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


def test_units_are_updated_in_turn_or_as_they_are_given() -> None:
    inner: Any = Inner(sgd())
    first, second = Sharing("a", "b"), Sharing("c")
    stepper = ParametersStepper(inner, [first, second, first])  # type: ignore[list-item]
    assert inner.by_unit
    assert stepper.optimizer is inner.optimizer
    stepper.start_update(7)
    stepper.step(0.5)
    stepper.step(0.25, True)
    given: Any = "given"
    stepper.step(1.0, True, given)
    assert inner.calls == [
        ("start_update", 7),
        *(("step", 0.5, False, unit) for unit in "abc"),
        *(("step", 0.25, True, unit) for unit in "abc"),
        ("step", 1.0, True, "given"),
    ]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("check_gradients", ("u",)),
        ("state", ("l",)),
        ("load", ("l", "s")),
        ("changed", ()),
        ("take_over", ("l",)),
        ("updated_tensors", ()),
        ("held_whole", ()),
    ],
)
def test_everything_else_is_the_other_stepper_s(name: str, given: tuple[Any, ...]) -> None:
    inner: Any = Inner(sgd())
    answer = getattr(ParametersStepper(inner, []), name)(*given)
    assert inner.calls == [(name, *given)]
    assert answer == (None if name in ("check_gradients", "load", "take_over") else name)
    assert ParametersStepper(inner, []).whole_parts == {"row_var"}


def test_an_optimizer_that_must_see_all_weights_is_refused_also_later() -> None:
    with pytest.raises(UserError, match="optimizer LBFGS with offload=parameters"):
        ParametersStepper(Inner(torch.optim.LBFGS([nn.Parameter(torch.ones(1))])), [])  # type: ignore[arg-type]
    inner: Any = Inner(sgd())
    stepper = ParametersStepper(inner, [Sharing("a")])  # type: ignore[list-item]
    inner.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(UserError, match="whose steps nobody watches by a hook"):
        stepper.step(1.0)
    assert inner.calls == []
