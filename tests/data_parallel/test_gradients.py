"""Norms of gradients, and the factor that clips them."""

import math

import pytest
import torch
from torch import nn

from echelon.data_parallel.gradients import clip_factor, squared_norm

CPU = torch.device("cpu")


def test_the_norm_is_over_all_gradients() -> None:
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0], [12.0]])]
    assert squared_norm(gradients, CPU).item() == 169.0
    turned = torch.tensor([[0.0, 6.0], [8.0, 0.0]]).t()  # not contiguous
    assert squared_norm([*gradients, turned], CPU).item() == pytest.approx(269.0, rel=1e-6)
    assert squared_norm([], CPU).item() == 0.0


def test_a_sparse_gradient_is_added_up_before_it_is_squared() -> None:
    table = nn.Embedding(3, 1, sparse=True)
    table(torch.tensor([1, 1, 2])).sum().backward()
    assert table.weight.grad is not None
    assert squared_norm([table.weight.grad], CPU).item() == 5.0  # 2² + 1²


def test_low_precision_is_squared_in_float32() -> None:
    gradients = [torch.full((1000,), 0.1, dtype=torch.bfloat16)]
    exact = gradients[0].double().square().sum().item()
    assert squared_norm(gradients, CPU).item() == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(("norm", "limit"), [(0.5, 1.0), (1.0, 1.0), (2.0, 1.0), (1e-9, 1e-3), (3.0, 0.0)])
def test_the_factor_is_torchs(norm: float, limit: float) -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.tensor([norm], dtype=torch.float64)
    nn.utils.clip_grad_norm_([parameter], limit)
    assert norm * clip_factor(norm, limit) == pytest.approx(parameter.grad.item(), rel=1e-12)


def test_nothing_is_clipped_without_a_limit_and_nan_stays() -> None:
    assert clip_factor(1e9, None) == 1.0
    assert math.isnan(clip_factor(math.nan, 1.0))
