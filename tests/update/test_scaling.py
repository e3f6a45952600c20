"""What an update does with its gradients: the same on the host and on a device, which is not read."""

import math

import pytest
import torch

from echelon.update.scaling import Scaling, scale_on_device, scale_on_host
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
    "no loss": ((math.nan, 4.0, 28.0, 400.0, 0.0), None),
    "no count": ((8.0, math.inf, math.inf, 400.0, 0.0), 1.0),
}


def on_device(sums: tuple[float, ...], clip: float | None, **rules: bool) -> Scaling:
    summed = torch.tensor(sums, dtype=torch.float64)
    with no_reads():
        on_device = scale_on_device(summed, clip, **rules)
    return Scaling(*(torch.as_tensor(value).item() for value in on_device))


def test_the_numbers_of_a_step_by_hand() -> None:
    scaling = scale_on_host((8.0, 5.0, 20.0, 25.0, 0.0), 2.0)
    assert scaling == pytest.approx((4 / 5 * 2.0 / (4.0 + 1e-6), False, False, 4.0, False))


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_host_and_device_compute_the_same(name: str, scaled: bool, skips: bool) -> None:
    rules = {"scaled": scaled, "skips": skips}
    expected = scale_on_host(*CASES[name], **rules)
    assert on_device(*CASES[name], **rules) == pytest.approx(expected, rel=1e-15, nan_ok=True)


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


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_loss_a_count_or_gradients_that_are_not_finite_leave_a_step_out(place: int, value: float) -> None:
    sums = [8.0, 4.0, 4.0, 400.0, 0.0]
    sums[place] = abs(value) if place == 3 else value  # squares have no sign
    for scale in (scale_on_host, on_device):
        scaling = scale(tuple(sums), None, skips=True)
        assert (scaling.skip, scaling.left_out, scaling.overflows) == (True, True, False)
        assert not scale(tuple(sums), None).skip
        sums[4] = 1.0
        refused = scale(tuple(sums), None, skips=True)
        assert (refused.refused, refused.left_out) == (True, False), "a problem is told as such"
        sums[4] = 0.0
        assert not scale((8.0, 4.0, 4.0, 400.0, 0.0), None, skips=True).skip


def test_of_scaled_losses_an_overflow_of_gradients_alone_is_the_scales_affair() -> None:
    for scale in (scale_on_host, on_device):
        overflow = scale((8.0, 4.0, 4.0, math.inf, 0.0), None, scaled=True, skips=True)
        assert (overflow.skip, overflow.overflows, overflow.left_out) == (True, True, False)
        loss = scale((math.nan, 4.0, 4.0, math.nan, 0.0), None, scaled=True, skips=True)
        assert (loss.skip, loss.overflows, loss.left_out) == (True, True, True)
