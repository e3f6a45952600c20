"""Contenders that train differently are told apart, and one device says which is right."""

import pytest
from benchmarks.loss_agreement import difference

from benchmarks import replicas

DDP = replicas.peers()[0]


def never() -> list[float]:
    raise AssertionError("one device need not train where the contenders agree")


def test_equal_losses_are_no_difference() -> None:
    """Peers tell their own loss, echelon that of all: 1.5 is the mean of 1 and 2."""
    ranks = [{"echelon": [1.5, 9.0], "torch DDP": [own, 3.0]} for own in (1.0, 2.0)]
    assert difference(DDP, ranks, 1, never) is None


@pytest.mark.parametrize(
    ("one_device", "says"),
    [
        ([1.5], "one device trains as echelon: "),
        ([1.505], "one device trains as torch DDP: "),
        ([2.5], "one device trains as neither: "),
        ([float("nan")], "one device trains as neither: "),
    ],
)
def test_one_device_tells_whose_losses_are_right(one_device: list[float], says: str) -> None:
    ranks = [{"echelon": [1.5], "torch DDP": [own]} for own in (1.0, 2.01)]
    told = difference(DDP, ranks, 1, lambda: [*one_device, 7.0])
    assert told is not None
    assert told.startswith(
        "zero=0: the losses of echelon and torch DDP differ, so they do not train the same; "
    )
    assert says in told
    assert "echelon 1.500000, off by " in told
    assert "torch DDP 1.505000, off by " in told


def test_a_loss_that_is_not_a_number_is_no_equal() -> None:
    told = difference(DDP, [{"echelon": [float("nan")], "torch DDP": [1.0]}], 1, lambda: [1.0])
    assert "one device trains as torch DDP" in str(told)
    assert "echelon nan, off by inf" in str(told)
