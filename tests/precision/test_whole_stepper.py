"""Updates of whole parameters: parts go to the rank that updates them, and back. One rank is both here."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import RecordingGroup
from echelon.ownership import MASTER, LocalParameter, own_run, run_slices
from echelon.precision import WholeStepper
from echelon.precision.whole_stepper import PartRoute, Routes, WholeRoute

SHAPE = (3, 4)


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.1)


def local_run(dtype: torch.dtype) -> LocalParameter:
    """The elements of a matrix as a run, as zero has them."""
    values = torch.arange(12, dtype=dtype)
    return LocalParameter("w", nn.Parameter(values.view(SHAPE)), nn.Parameter(values.clone()))


def stepper_of(local: LocalParameter, **options: Any) -> WholeStepper:
    slices = [box for begin, end in ((0, 6), (6, 12)) for box in run_slices("w", SHAPE, begin, end)]

    def views(tensor: Tensor) -> list[Tensor]:
        return [owned.tensor for owned in own_run(tensor, slices)]

    group = RecordingGroup("stage")
    routes = Routes(
        group,
        [PartRoute(local, 0, views)],
        [WholeRoute(local, 0, slices)],
        torch.float32,
        torch.device("cpu"),
    )
    return WholeStepper(muon([local.parameter]), routes, **{"masters": False, **options})


def gradient(step: int) -> Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("deferred", [False, True])
def test_parts_are_updated_as_the_whole(deferred: bool) -> None:
    local, whole = local_run(torch.float32), nn.Parameter(torch.arange(12.0).view(SHAPE))
    stepper, reference = stepper_of(local, deferred=deferred), muon([whole])
    for step in range(3):
        local.tensor.grad, whole.grad = gradient(step), 0.5 * gradient(step).view(SHAPE)
        stepper.step(torch.tensor(0.5).double() if deferred else 0.5)
        reference.step()
    assert torch.equal(local.tensor.view(SHAPE), whole)
    (owned,) = stepper.held_whole()
    assert owned.slice.part == "momentum_buffer"
    assert owned.slice.shape == SHAPE
    assert torch.equal(owned.tensor, reference.state[whole]["momentum_buffer"])


def test_a_weight_that_somebody_has_changed_is_updated_as_it_is() -> None:
    local = local_run(torch.float32)
    stepper = stepper_of(local)
    local.tensor.grad = gradient(0)
    stepper.step(1.0)
    local.tensor.data.zero_()
    local.tensor.grad = torch.zeros(12)
    stepper.step(0.0)
    assert float(local.tensor.detach().abs().max()) < 0.2, "one update from zero"


def test_below_float32_whole_masters_stay() -> None:
    local, master = local_run(torch.bfloat16), nn.Parameter(torch.arange(12.0).view(SHAPE))
    stepper, reference = stepper_of(local, masters=True), muon([master])
    local.tensor.grad_dtype = torch.float32
    assert not stepper.held_whole()
    for step in range(3):
        local.tensor.grad, master.grad = gradient(step), gradient(step).view(SHAPE)
        stepper.step(1.0)
        reference.step()
    held = {owned.slice.part: owned.tensor for owned in stepper.held_whole()}
    assert torch.equal(held[MASTER], master)
    assert torch.equal(local.tensor.view(SHAPE), master.bfloat16())


def test_a_parameter_without_a_gradient_has_a_master_too() -> None:
    """As it has on one device, whose masters are those of all weights."""
    local = local_run(torch.bfloat16)
    stepper = stepper_of(local, masters=True)
    stepper.step(1.0)
    (owned,) = stepper.held_whole()
    assert owned.slice.part == MASTER
    assert owned.tensor.tolist() == torch.arange(12.0).view(SHAPE).tolist()
    assert local.tensor.tolist() == list(range(12))


@pytest.mark.parametrize("deferred", [False, True])
def test_a_skipped_update_and_one_without_gradients_change_nothing(deferred: bool) -> None:
    local = local_run(torch.float32)
    stepper = stepper_of(local, deferred=deferred)
    local.tensor.grad = torch.full((12,), float("nan"))
    stepper.step(1.0, torch.tensor(True) if deferred else True)
    local.tensor.grad = None
    stepper.step(1.0)
    assert local.tensor.tolist() == list(range(12))
    assert not stepper.held_whole()
