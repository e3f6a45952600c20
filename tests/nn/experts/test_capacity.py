"""Which slots are over the capacity."""

import torch

from echelon.nn.experts.capacity import capacity_of, over_capacity


def test_the_example_of_the_docstring() -> None:
    a, b, c = 0, 1, 2
    indices = torch.tensor([[[a, b], [a, b], [a, c], [b, c]]])
    over = over_capacity(indices, 2)
    assert over.tolist() == [[[False, False], [False, True], [True, False], [False, False]]]


def test_samples_have_capacities_of_their_own() -> None:
    indices = torch.zeros(3, 4, 1, dtype=torch.int64)
    assert over_capacity(indices, 3).flatten(1).tolist() == [[False, False, False, True]] * 3


def test_capacities_are_rounded_up() -> None:
    assert capacity_of(1.0, 8, 1, 4) == 2
    assert capacity_of(1.25, 8, 1, 4) == 3
    assert capacity_of(1.0, 8, 2, 4) == 4
    assert capacity_of(0.01, 8, 1, 4) == 1
