"""Grouped products of any sizes, run in numpy."""

import pytest
import torch

import echelon.nn.experts
from echelon.nn.experts.rows import multiply, outer
from tests.nn.dropout.triton_stand_in import kernel_on_cpu
from tests.nn.experts.test_tma_kernels import COUNTS, draw


@pytest.mark.parametrize("counts", COUNTS)
def test_products_are_those_of_each_expert(counts: list[int]) -> None:
    own = sum(counts)
    ends, (rows, left, matrices) = draw(counts, (-1, 33), (-1, 70), (len(counts), 33, 70))
    expected = multiply(rows, matrices, ends), outer(left, rows, ends)
    with kernel_on_cpu(echelon.nn.experts, "product_kernels") as kernels:
        product, products = kernels.multiply(rows, matrices, ends), kernels.outer(left, rows, ends)
    torch.testing.assert_close(product[:own], expected[0][:own], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(products, expected[1], rtol=1e-4, atol=1e-4)
