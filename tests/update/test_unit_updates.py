"""Updates of units in the backward pass, and their rehearsal."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.state.ownership import LocalParameter
from echelon.update import unit_updates
from echelon.update.unit_updates import UnitUpdates, flip_bits

CPU = torch.device("cpu")


class Stepper:
    def __init__(self, *, on_host: bool = False) -> None:
        self.on_host, self.optimizer = on_host, object()
        self.calls: list[Any] = []
        self.after: list[Any] = []
        self.is_present = False

    def start_update(self, number: int) -> None:
        self.calls.append(("start", number))

    def step(self, factor: float, skip: object, local: list[LocalParameter]) -> None:
        self.calls.append(("step", factor, skip, len(local), self.is_present))

    def after_unit(self, local: list[LocalParameter], skip: object) -> None:
        self.after.append((len(local), skip, self.is_present))

    def changed(self) -> list[LocalParameter]:
        return []

    def end_rehearsal(self, changed: list[LocalParameter]) -> None:
        self.calls.append(("end", changed))

    def check_gradients(self, local: list[LocalParameter]) -> None:
        self.calls.append(("check", len(local), self.is_present))


class Sharing:
    update: Any = None

    def update_in_backward(self, update: Any) -> None:
        self.update = update


class Unit:
    """One weight with a gradient, [3, 4], and one without."""

    def __init__(self, stepper: Stepper, *shares: Tensor) -> None:
        self._stepper, self.norm_share = stepper, list(shares)
        self.weights = [nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.ones(1))]
        self.weights[0].grad = torch.tensor([3.0, 4.0])
        self.local = [LocalParameter(str(i), weight, weight) for i, weight in enumerate(self.weights)]

    @contextmanager
    def present(self) -> Iterator[None]:
        self._stepper.is_present = True
        yield
        self._stepper.is_present = False


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    seen: list[object] = []
    monkeypatch.setattr(unit_updates, "check_takes_units", seen.append)
    return seen


def units_of(stepper: Any) -> tuple[UnitUpdates, Any]:
    sharing: Any = Sharing()
    return UnitUpdates([sharing], stepper), sharing


@pytest.mark.parametrize("on_host", [False, True])
def test_a_unit_is_updated_when_its_gradients_are_summed(on_host: bool, checked: list[object]) -> None:
    stepper = Stepper(on_host=on_host)
    units, sharing = units_of(stepper)
    heard: list[int] = []
    units.start_passes(lambda: False, lambda: heard.append(len(stepper.calls)))
    units.start_step(5)
    assert (checked, units.has_updated) == ([stepper.optimizer], False)
    sharing.update(Unit(stepper))
    assert (stepper.calls, heard) == ([("start", 5), ("step", 1.0, False, 2, not on_host)], [1])
    assert units.has_updated
    assert stepper.after == [(2, False, not on_host)]
    units.start_passes(lambda: True, lambda: None)
    sharing.update(Unit(stepper))
    assert stepper.calls[-1][2] is True
    units.start_step(6)
    assert not units.has_updated


def test_squares_add_up_until_the_next_step() -> None:
    stepper = Stepper()
    units, sharing = units_of(stepper)
    units.start_step(0)
    assert (units.square(CPU).item(), units.square(CPU).dtype) == (0.0, torch.float64)
    sharing.update(Unit(stepper))
    assert units.square(CPU) == 0
    sharing.update(Unit(stepper, torch.tensor([3.0]), torch.tensor([4.0])))
    assert units.square(CPU) == 25
    sharing.update(Unit(stepper, torch.tensor([2.0])))
    assert units.square(CPU) == 29
    units.start_step(1)
    assert units.square(CPU) == 0


def test_a_rehearsal_updates_nothing_and_leaves_every_bit_as_it_was() -> None:
    stepper = Stepper()
    units, sharing = units_of(stepper)
    seen: list[int] = []
    unit, other = Unit(stepper, torch.tensor([2.0])), Unit(stepper)
    before = [weight.detach().clone() for weight in unit.weights]
    with units.rehearse(lambda local: seen.append(len(local))):
        units.start_step(0)
        sharing.update(unit)
        assert stepper.calls == [("check", 2, True)], "no update is begun"
        assert not torch.equal(unit.weights[0], before[0]), "whoever reads it now sees other weights"
        assert torch.equal(unit.weights[1], before[1]), "which has no gradient"
        assert (units.has_updated, units.square(CPU).item()) == (False, 4.0)
        units.finish_passes()
        assert all(map(torch.equal, unit.weights, before))
        sharing.update(other)
    assert all(map(torch.equal, other.weights, before)), "also where the passes end in an error"
    assert (seen, units.rehearsal) == ([2, 2], None)
    units.finish_passes()
    sharing.update(unit)
    assert stepper.calls[-1] == ("step", 1.0, False, 2, True)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e5m2, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_all_bits_are_flipped_and_flipped_back(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.0, 1.0, -3.5]).to(dtype)
    before = tensor.clone().view(torch.uint8)
    flip_bits(tensor)
    assert torch.equal(tensor.view(torch.uint8), ~before)
    flip_bits(tensor)
    assert torch.equal(tensor.view(torch.uint8), before)
