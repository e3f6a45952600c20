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
}


def on_device(sums: tuple[float, ...], clip: float | None) -> Scaling:
    summed = torch.tensor(sums, dtype=torch.float64)
    with no_reads():
        on_device = scale_on_device(summed, clip)
    return Scaling(*(value.item() for value in on_device))  # type: ignore[union-attr]


def test_the_numbers_of_a_step_by_hand() -> None:
    scaling = scale_on_host((8.0, 5.0, 20.0, 25.0, 0.0), 2.0)
    assert scaling == pytest.approx((4 / 5 * 2.0 / (4.0 + 1e-6), False, 4.0))


@pytest.mark.parametrize("name", CASES)
def test_host_and_device_compute_the_same(name: str) -> None:
    assert on_device(*CASES[name]) == pytest.approx(scale_on_host(*CASES[name]), rel=1e-15)


def test_an_update_of_no_samples_is_skipped() -> None:
    for scale in (scale_on_host, on_device):
        _, skip, norm = scale((0.0, 0.0, 0.0, 9.0, 0.0), 1.0)
        assert (skip, norm) == (True, 0.0)
