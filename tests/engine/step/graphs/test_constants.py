"""What models and losses read from Python is compared; values of tensors are not."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.engine.step.graphs.constants import Constants, TooManyOwnersError

FACTOR = 2.0


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(2))
        self.config = SimpleNamespace(scale=1.0, names=["a"])
        self.weights = {"rare": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * FACTOR


def set_global(module: Reading) -> None:
    del module
    globals()["FACTOR"] = 3.0


CHANGES: dict[str, Any] = {
    "attribute": lambda module: setattr(module, "scale", 1.0),
    "entry": lambda module: module.weights.update(rare=2.0),
    "object": lambda module: setattr(module.config, "scale", 2.0),
    "member": lambda module: module.config.names.append("b"),
    "mode": lambda module: module.linear.eval(),
    "hook": lambda module: module.linear.register_forward_hook(lambda *_: None),
    "weight hook": lambda module: module.linear.weight.register_hook(lambda _: None),
    "child": lambda module: setattr(module, "linear", nn.Linear(2, 2)),
    "weight": lambda module: setattr(module.linear, "weight", nn.Parameter(torch.ones(2, 2))),
    "buffer": lambda module: setattr(module, "table", torch.ones(2)),
    "memory": lambda module: setattr(module.linear.weight, "data", torch.ones(2, 2)),
    "frozen": lambda module: module.linear.weight.requires_grad_(False),
    "global": set_global,
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen(name: str) -> None:
    module = Reading()
    constants = Constants(module.modules())
    assert constants.changed() is None
    CHANGES[name](module)
    assert constants.changed() is not None
    constants.record()
    assert constants.changed() is None
    globals()["FACTOR"] = 2.0


def test_values_of_tensors_are_no_constants() -> None:
    module = Reading()
    constants = Constants(module.modules())
    with torch.no_grad():
        module.linear.weight.zero_()
        module.table.add_(1)
    module.weights["rare"] = float("1.0")  # an equal number
    assert constants.changed() is None


def test_closures_partials_and_modules_of_losses_are_read() -> None:
    factor = 1.0
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def inner(output: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = criterion(output, targets) * factor
        return loss

    constants = Constants([], [functools.partial(inner)])
    assert constants.changed() is None
    criterion.label_smoothing = 0.2
    assert constants.changed() == "partial"
    constants.record()
    factor = 2.0
    assert constants.changed() == "partial"


def test_a_model_that_reaches_too_much_is_refused() -> None:
    module = Reading()
    module.table_of_lists = [[number] for number in range(3000)]  # type: ignore[assignment]
    with pytest.raises(TooManyOwnersError):
        Constants(module.modules())
