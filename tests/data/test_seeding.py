"""Random numbers of a sample, and batches without one."""

import random
from collections import namedtuple

import numpy as np
import torch

from echelon.data.seeding import seeded, without_samples


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_numbers_follow_the_seed_and_generators_go_on_as_before() -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = draws()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    with seeded(1, 2) as seed_again:
        first = draws()
        seed_again(1, 2)
        assert draws() == first
    with seeded(2, 1):
        assert draws() != first
    assert draws() == expected


def test_a_batch_without_samples_has_the_same_form() -> None:
    Pair = namedtuple("Pair", "x y")
    batch = {"a": torch.ones(2, 3), "b": [torch.ones(2)], "c": Pair(torch.ones(2), "text"), "d": 4}
    empty = without_samples(batch)
    assert empty["a"].shape == (0, 3)
    assert empty["b"][0].shape == (0,)
    assert (empty["c"].x.shape, empty["c"].y, empty["d"]) == ((0,), "text", 4)
