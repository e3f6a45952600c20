"""Masks are the same on every device."""

import pytest
import torch

from echelon.dropout import keep_mask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("shape", [(64, 128, 768), (7, 33), (5,)])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_masks_are_those_of_the_cpu(shape: tuple[int, ...], p: float) -> None:
    here = keep_mask(1, 2, 3, 4, shape, p, "cuda")
    assert torch.equal(here.cpu(), keep_mask(1, 2, 3, 4, shape, p, "cpu"))
