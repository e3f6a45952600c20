"""Ring attention by the kernels of a GPU: as precise as torch's attention, and nearly as fast."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from echelon.parallel.context.blocks import find_kernel
from tests.gpu.context_speed import LEAST, measure
from tests.parallel.context.precision import MOST_ERROR, Shape, by_torch, errors, in_ring, inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # in the thread of the backward pass
]


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("tokens", "transposed"), [(1024, False), (1000, False), (1000, True)])
def test_kernels_are_as_precise_as_torch(
    backend: SDPBackend, dtype: torch.dtype, kv_heads: int, width: int, tokens: int, transposed: bool
) -> None:
    tensors = inputs(Shape(8, kv_heads, tokens, width, transposed), dtype, "cuda")
    exact = by_torch(tensors, torch.float64)
    with sdpa_kernel(backend):
        assert find_kernel(tensors[0], tensors[1], tensors[2], causal=True) is not None
        expected, found = errors(by_torch(tensors, dtype), exact), errors(in_ring(tensors), exact)
    for by_ring, by_torchs_kernel in zip(found, expected, strict=True):
        assert by_ring <= MOST_ERROR * by_torchs_kernel, (found, expected)


@pytest.mark.parametrize("kv_heads", [32, 8])
def test_one_rank_attends_nearly_as_fast_as_torch(kv_heads: int) -> None:
    result = measure(kv_heads=kv_heads)
    assert result["ratio"] >= LEAST, result
