"""State that begins when it is asked for: how it is made, who has none, and what begins alike."""

from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.update.optim.first_state import FirstState, FirstStates, _begins_alike, begin_like
from tests.update.optim.test_first_state import parameter


def test_state_is_read_when_no_update_is_under_way() -> None:
    states, tensor = FirstStates(), parameter(2)
    states[tensor] = {"step": 1}
    calls: list[int] = []
    states.before_read = lambda: calls.append(1)
    assert states[tensor] == states.get(tensor) == {"step": 1}
    assert list(states.values()) == [{"step": 1}]
    assert list(states.items()) == [(tensor, {"step": 1})]
    assert len(calls) == 4
    assert states.get(parameter(3), 7) == 7
    states.before_read = None
    assert states[tensor] == {"step": 1}


@pytest.mark.parametrize(
    "use",
    [
        lambda states, replaced: states[replaced],
        lambda states, replaced: states.get(replaced),
        lambda states, replaced: states.__setitem__(replaced, {}),
    ],
)
def test_a_parameter_that_others_are_updated_for_has_no_state(use: Any) -> None:
    states, replaced = FirstStates(), parameter(2)
    states.replaced = frozenset({replaced})
    with pytest.raises(UserError, match=r"optimizer.state of a parameter of shape \(2,\): in its place"):
        use(states, replaced)


def test_a_state_that_begins_is_made_once_and_is_its_own() -> None:
    tensor = parameter(2, 3, dtype=torch.float64)
    states, step = FirstStates(), torch.tensor(4.0)
    states.first[tensor] = FirstState({"sum": torch.tensor(0.5)}, {"step": step, "calls": 2})
    made = states[tensor]
    assert states[tensor] is made
    assert (made["sum"].shape, made["sum"].dtype, made["calls"]) == ((2, 3), torch.float32, 2)
    assert bool((made["sum"] == 0.5).all())
    made["step"] += 1
    assert step == 4, "that of others begins as this one did"
    assert states[parameter(1)] == {}
    begun = begin_like(states, small := parameter(1), tensor)
    assert begun[small]["sum"].tolist() == [0.5]
    assert begin_like(states, small, parameter(9))[small] == {}
    assert begin_like({}, small, tensor)[small] == {}


@pytest.mark.parametrize(
    ("made", "small", "whole", "is_alike"),
    [
        (1, 1, None, True),
        (1, 2, None, False),
        ("a", "a", None, False),
        (torch.tensor(2.0), torch.tensor(2.0), None, True),
        (torch.tensor([2.0]), torch.tensor(2.0), None, False),
        (torch.full((2, 3), 0.5), torch.tensor(0.5), torch.zeros(2, 3), True),
        (torch.full((3, 2), 0.5), torch.tensor(0.5), torch.zeros(2, 3), False),
        (torch.tensor([0.5, 0.25]), torch.tensor(0.5), torch.zeros(2), False),
        (
            torch.full((2,), 0.1, dtype=torch.float64),
            torch.tensor(0.1, dtype=torch.float64),
            torch.zeros(2),
            True,
        ),
        (None, None, None, True),
    ],
)
def test_what_begins_alike(made: Any, small: Any, whole: Tensor | None, is_alike: bool) -> None:
    assert _begins_alike(made, small, whole) is is_alike
