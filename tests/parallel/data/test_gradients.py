"""The norm of gradients, and how much to clip."""

import math

import pytest
import torch
from torch import Tensor, nn

from echelon.parallel.data import clip_factor, squared_norm
from tests.reads import no_reads

CPU = torch.device("cpu")


def sparse(places: list[int], values: list[float]) -> Tensor:
    """What an embedding makes. (torch 2.11 warns of its own constructor of sparse tensors.)"""
    table = nn.Parameter(torch.zeros(4, 1))
    rows = nn.functional.embedding(torch.tensor(places), table, sparse=True)
    rows.backward(torch.tensor(values).view(-1, 1))
    assert table.grad is not None
    return table.grad


@pytest.mark.parametrize(
    "gradients",
    [
        [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])],
        [torch.tensor([3.0, 4.0, 0.0]), torch.tensor([[0.0, 12.0], [0.0, 0.0]]).t()],
        [torch.tensor([3.0, 4.0, 12.0], dtype=torch.bfloat16)],
        [torch.tensor([3.0, 4.0], dtype=torch.bfloat16), torch.tensor([12.0])],
    ],
)
def test_the_sum_of_squares_over_all(gradients: list[Tensor]) -> None:
    result = squared_norm(gradients, CPU)
    assert float(result) == 169.0
    assert (result.dtype, result.shape) == (torch.float64, ())


def test_an_element_that_comes_twice_in_a_sparse_gradient_is_summed_before_it_is_squared() -> None:
    gradient = sparse([0, 2, 2], [5.0, 6.0, 6.0])
    assert (gradient.is_sparse, gradient.is_coalesced()) == (True, False)
    assert float(squared_norm([gradient], CPU)) == 169.0


def test_no_gradients_have_norm_0() -> None:
    assert squared_norm([], CPU).tolist() == 0.0


def test_a_norm_in_low_precision_is_summed_in_a_higher_one() -> None:
    """In bf16 a sum of ones ends at 256."""
    assert float(squared_norm([torch.ones(100_000, dtype=torch.bfloat16)], CPU)) == pytest.approx(1e5)


@pytest.mark.parametrize(
    ("norm", "limit", "factor"),
    [
        (5.0, None, 1.0),
        (0.5, 1.0, 1.0),
        (1.0 - 1e-6, 1.0, 1.0),
        (4.0, 1.0, 1 / (4 + 1e-6)),
        (math.inf, 1.0, 0.0),
        (0.0, 1.0, 1.0),
    ],
)
def test_gradients_are_scaled_down_and_never_up(norm: float, limit: float | None, factor: float) -> None:
    assert clip_factor(norm, limit) == factor
    assert clip_factor(torch.tensor(norm, dtype=torch.float64), limit) == factor


def test_a_norm_on_the_device_is_not_read() -> None:
    with no_reads():
        factor = clip_factor(torch.tensor(4.0, dtype=torch.float64), 1.0)
    assert factor == 1 / (4 + 1e-6)


def test_a_norm_that_is_no_number_shows() -> None:
    assert math.isnan(clip_factor(math.nan, 1.0))
    assert math.isnan(clip_factor(torch.tensor(math.nan), 1.0))


@pytest.mark.parametrize(("norm", "limit"), [(0.5, 1.0), (1.0, 1.0), (2.0, 1.0), (1e-9, 1e-3), (3.0, 0.0)])
def test_the_factor_is_torchs(norm: float, limit: float) -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.tensor([norm], dtype=torch.float64)
    nn.utils.clip_grad_norm_([parameter], limit)
    assert norm * float(clip_factor(norm, limit)) == pytest.approx(parameter.grad.item(), rel=1e-12)
