"""What an update does with its gradients: the same on the host and on a device, which is not read."""

import math

import pytest
import torch

from echelon.runtime.scaling import Scaling, scale_on_device, scale_on_host
from tests.reads import no_reads

CASES = {
    "sums": ((8.0, 4.0, 4.0, 400.0, 0.0), None),
    "means": ((8.0, 4.0, 16.0, 25.0, 0.0), None),
    "another count": ((8.0, 5.0, 20.0, 25.0, 0.0), 2.0),
    "clipped": ((8.0, 4.0, 4.0, 400.0, 0.0), 1.0),
    "no norm": ((8.0, 4.0, 12.0, 0.0, 0.0), 1.0),
    "a problem": ((8.0, 4.0, 28.0, 400.0, 2.0), 1.0),
    "not finite": ((8.0, 4.0, 28.0, math.inf, 0.0), 1.0),
    "no number": ((8.0, 4.0, 28.0, math.nan, 0.0), None),
}


def on_device(sums: tuple[float, ...], clip: float | None, *, scaled: bool = False) -> Scaling:
    summed = torch.tensor(sums, dtype=torch.float64)
    with no_reads():
        on_device = scale_on_device(summed, clip, scaled=scaled)
    return Scaling(*(value.item() for value in on_device))  # type: ignore[union-attr]


def test_the_numbers_of_a_step_by_hand() -> None:
    scaling = scale_on_host((8.0, 5.0, 20.0, 25.0, 0.0), 2.0)
    assert scaling == pytest.approx((4 / 5 * 2.0 / (4.0 + 1e-6), False, False, 4.0))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_host_and_device_compute_the_same(name: str, scaled: bool) -> None:
    expected = scale_on_host(*CASES[name], scaled=scaled)
    assert on_device(*CASES[name], scaled=scaled) == pytest.approx(expected, rel=1e-15, nan_ok=True)


def test_an_update_of_no_samples_is_skipped() -> None:
    for scale in (scale_on_host, on_device):
        scaling = scale((0.0, 0.0, 0.0, 9.0, 0.0), 1.0)
        assert (scaling.skip, scaling.refused, scaling.norm) == (True, True, 0.0)


@pytest.mark.parametrize("square", [math.inf, math.nan])
def test_squares_that_are_not_finite_are_an_overflow_where_losses_are_scaled(square: float) -> None:
    for scale in (scale_on_host, on_device):
        overflow = scale((8.0, 4.0, 4.0, square, 0.0), None, scaled=True)
        assert (overflow.skip, overflow.refused, overflow.overflows) == (True, False, True)
        assert not scale((8.0, 4.0, 4.0, square, 0.0), None).skip, "fp32 trains on, as one device does"
        problem = scale((8.0, 4.0, 4.0, square, 1.0), None, scaled=True)
        assert (problem.refused, problem.overflows) == (True, False), "refused: it says nothing of the scale"
        assert not scale((8.0, 4.0, 4.0, 65504.0**2, 0.0), None, scaled=True).skip
