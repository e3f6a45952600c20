"""Tensors with many zeros: all bits come back, from the smaller form."""

import pytest
import torch
from torch import Tensor

from echelon.memory.gist import sparse


def with_density(num: int, density: float, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(num)
    return torch.where(torch.rand(num) < density, torch.randn(num), 0).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("density", [0.0, 0.03, 0.5])
@pytest.mark.parametrize("num", [256, 1000, 5000])
def test_sparse_tensors_come_back(num: int, density: float, dtype: torch.dtype) -> None:
    flat = with_density(num, density, dtype)
    flat[-1] = -0.0
    parts = sparse.encode(flat)
    assert parts is not None
    assert sum(part.nbytes for part in parts) < flat.nbytes
    again = sparse.decode(parts, num)
    integers = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(again.view(integers), flat.view(integers))


def test_the_smaller_sparse_form_is_taken() -> None:
    rare = sparse.encode(with_density(2560, 0.02, torch.float32))
    assert rare is not None
    assert len(rare.counts) == 10
    assert len(rare.places) == len(rare.values)
    common = sparse.encode(with_density(2560, 0.4, torch.float32))
    assert common is not None
    assert len(common.counts) == 0
    assert len(common.places) == 320
    assert sparse.encode(with_density(2560, 1.0, torch.float32)) is None
