"""Grouped products by TMA, run in numpy: tiles find their expert, and write its rows alone."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import echelon.nn.experts
from echelon.nn.experts.rows import multiply, outer
from tests.nn.dropout.triton_stand_in import kernel_on_cpu

COUNTS = [[300, 0, 77, 128, 1], [0, 0, 260], [0, 0], [5]]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with kernel_on_cpu(echelon.nn.experts, "tma_kernels") as module:
        monkeypatch.setattr(module, "_programs", lambda _: 3)
        yield module


def draw(counts: list[int], *shapes: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """Where rows end, and operands; -1 in a shape is the number of rows, of which 7 belong to no expert."""
    generator = torch.Generator().manual_seed(0)
    sizes = [[sum(counts) + 7 if size == -1 else size for size in shape] for shape in shapes]
    return torch.tensor(counts).cumsum(0).int(), [torch.randn(size, generator=generator) for size in sizes]


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("width", [256, 136])
@pytest.mark.parametrize("counts", COUNTS)
def test_rows_are_multiplied_by_the_matrix_of_their_expert(
    kernels: Any, counts: list[int], width: int, by_row: bool
) -> None:
    stored = (64, width) if by_row else (width, 72)
    ends, (rows, matrices) = draw(counts, (-1, stored[not by_row]), (len(counts), *stored))
    matrices = matrices if by_row else matrices.transpose(1, 2)
    product, own = kernels.multiply(rows, matrices, ends), sum(counts)
    torch.testing.assert_close(product[:own], multiply(rows, matrices, ends)[:own], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [256, 136])
@pytest.mark.parametrize("counts", COUNTS)
def test_products_of_the_rows_of_each_expert(kernels: Any, counts: list[int], width: int) -> None:
    ends, (left, right) = draw(counts, (-1, 264), (-1, width))
    left[sum(counts) :] = torch.inf  # of no expert
    expected = outer(left, right, ends)
    torch.testing.assert_close(kernels.outer(left, right, ends), expected, rtol=1e-4, atol=1e-4)
