"""The loss scale from step to step: the same on the host and on a device, which is not read."""

import math

import pytest
import torch
from torch import Tensor

from echelon.update.precision.loss_scaling import (
    DynamicScale,
    LossScale,
    LossScaling,
    loss_scale_errors,
    make_loss_scaling,
)
from tests.reads import no_reads

GOOD, OVERFLOW, REFUSED, BOTH = (False, False), (True, False), (False, True), (True, True)


def states(
    choice: LossScale, steps: list[tuple[bool, bool]], *, on_device: bool = False
) -> list[tuple[float, float]]:
    """The state after each step, of (overflows, refused)."""
    scaling = LossScaling(choice, torch.device("cpu") if on_device else None)
    found = [scaling.state]
    for step in steps:
        overflows, refused = map(torch.tensor, step) if on_device else step
        if on_device:
            with no_reads():
                scaling.after_step(overflows=overflows, refused=refused)
        else:
            scaling.after_step(overflows=overflows, refused=refused)
        found.append(scaling.state)
    return [(float(scale), float(good)) for scale, good in found]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_dynamic_scale_falls_at_once_and_rises_after_many_good_steps(on_device: bool) -> None:
    rule = DynamicScale(start=64.0, factor=4.0, interval=3)
    steps = [GOOD, OVERFLOW, GOOD, GOOD, GOOD, GOOD, REFUSED, GOOD, BOTH]
    assert states(rule, steps, on_device=on_device) == [
        (64.0, 0.0),
        (64.0, 1.0),
        (16.0, 0.0),
        (16.0, 1.0),
        (16.0, 2.0),
        (64.0, 0.0),
        (64.0, 1.0),
        (64.0, 1.0),  # a refused step is neither good nor bad
        (64.0, 2.0),
        (16.0, 0.0),
    ]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_dynamic_scale_does_not_fall_below_1(on_device: bool) -> None:
    after = states(DynamicScale(start=3.0), [OVERFLOW] * 3, on_device=on_device)
    assert [scale for scale, _ in after] == [3.0, 1.5, 1.0, 1.0]


def test_the_default_starts_at_65536_and_doubles_after_2000_steps() -> None:
    after = states("dynamic", [GOOD] * 2000)
    assert after[0] == (2.0**16, 0.0)
    assert after[1999] == (2.0**16, 1999.0)
    assert after[2000] == (2.0**17, 0.0)
    assert states("dynamic", [OVERFLOW])[-1] == (2.0**15, 0.0)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_number_stays_what_it_is(on_device: bool) -> None:
    assert states(1024, [OVERFLOW, GOOD], on_device=on_device) == [(1024.0, 0.0)] * 3
    assert LossScaling(1024).smallest == 1024.0
    assert LossScaling("dynamic").smallest == 1.0


def test_what_goes_on_after_a_restart_has_a_name() -> None:
    scaling = LossScaling(DynamicScale(start=8.0))
    scaling.after_step(overflows=False, refused=False)
    assert scaling.counters() == {"loss scale": 8.0, "good steps": 1.0}
    on_device = LossScaling("dynamic", torch.device("cpu")).counters()
    assert all(isinstance(each, Tensor) and each.dtype == torch.float64 for each in on_device.values())


@pytest.mark.parametrize("on_device", [False, True])
def test_a_dynamic_scale_goes_on_with_that_of_a_checkpoint(on_device: bool) -> None:
    scaling = LossScaling("dynamic", torch.device("cpu") if on_device else None)
    scaling.restore({})
    assert (float(scaling.scale), float(scaling.state.good_steps)) == (2.0**16, 0)
    scaling.restore({"loss scale": 4, "good steps": 7})
    assert (float(scaling.scale), float(scaling.state.good_steps)) == (4.0, 7.0)
    assert {type(number) for number in scaling.state} == {Tensor if on_device else float}
    fixed = LossScaling(8.0)
    fixed.restore({"loss scale": 4, "good steps": 7})
    assert fixed.state == (8.0, 0.0)


def test_a_choice_and_a_device_are_taken() -> None:
    scaling = make_loss_scaling(16, "fp16", torch.device("cpu"))
    assert scaling is not None
    assert isinstance(scaling.scale, Tensor)
    assert float(scaling.scale) == 16
    assert loss_scale_errors(16, None) == []


def test_only_fp16_is_scaled() -> None:
    assert make_loss_scaling(None, "bf16") is None
    scaling = make_loss_scaling(None, "fp16")
    assert scaling is not None
    assert scaling.scale == 2.0**16
    errors = loss_scale_errors(8.0, "bf16")
    assert len(errors) == 1
    assert "loss_scale=8.0 precision=bf16: only losses of fp16 are scaled" in errors[0]
    assert "use precision=fp16" in errors[0]


@pytest.mark.parametrize("choice", [None, "dynamic", 1, 0.5, 2.0**20, DynamicScale(1.0, 1.5, 1)])
def test_these_are_loss_scales(choice: LossScale | None) -> None:
    assert loss_scale_errors(choice, "fp16") == []


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ("static", "loss_scale='static': must be 'dynamic', a number above 0, or a DynamicScale"),
        (True, "loss_scale=True: must be"),
        (0, "loss_scale=0: must be"),
        (math.inf, "loss_scale=inf: must be"),
        (DynamicScale(start=0.5), "DynamicScale(start=0.5): must be a number, at least 1"),
        (DynamicScale(factor=1.0), "DynamicScale(factor=1.0): must be a number above 1"),
        (-1.0, "loss_scale=-1.0: must be"),
        (DynamicScale(start=math.nan), "DynamicScale(start=nan): must be"),
        (DynamicScale(start="a"), "DynamicScale(start='a'): must be"),  # type: ignore[arg-type]
        (DynamicScale(factor=math.inf), "DynamicScale(factor=inf): must be"),
        (DynamicScale(interval=True), "DynamicScale(interval=True): must be"),
        (DynamicScale(interval=2.0), "DynamicScale(interval=2.0): must be"),  # type: ignore[arg-type]
        (DynamicScale(interval=0), "DynamicScale(interval=0): must be a number of steps"),
    ],
)
def test_others_are_refused_with_what_must_be(choice: object, says: str) -> None:
    (error,) = loss_scale_errors(choice, "fp16")
    assert says in error


def test_all_errors_are_listed() -> None:
    assert len(loss_scale_errors(DynamicScale(0.0, 0.0, 0), "fp32")) == 4
