"""Which dim of a drawn tensor counts samples."""

import pytest
import torch
from torch import Tensor, nn

from echelon.nn.draws.sample_dim import find_dim


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((4, 3), 0),
        ((4,), 0),
        ((10, 4, 3), 1),
        ((20, 3), 0),  # five rows of each sample
        ((8, 4, 4), 0),  # weights of attention
        ((5, 4, 4), 1),
        ((3, 5), None),
        ((1, 4), None),  # is spread over the samples
        ((1,), None),
        ((), None),
    ],
)
def test_the_dim_is_found_by_the_number_of_samples(shape: tuple[int, ...], dim: int | None) -> None:
    assert find_dim(shape, 4, None, nn.Module()) == dim


def test_what_is_drawn_for_a_weight_belongs_to_no_sample() -> None:
    layer = nn.Linear(8, 4)
    weight = layer.weight
    for like in (weight, weight.data, weight[:], nn.Parameter(torch.zeros(4, 8))):
        assert find_dim(tuple(like.shape), 4, like, nn.Module() if like is weight else layer) is None
    assert find_dim((4, 8), 4, None, layer) is None  # the shape of its weight
    assert find_dim((8,), 4, None, layer) is None  # a size of its weight: a factor of a noise
    assert find_dim((8,), 4, torch.zeros(8), layer) == 0  # two rows of each sample
    assert find_dim((4, 3), 4, Tensor(4, 3), layer) == 0
