"""Spectral norms between the microbatches of a step: estimates stay, and nothing else does."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from echelon.parallel.power_iteration import iterated_modules, no_iteration


@pytest.mark.parametrize("normalise", [nn.utils.spectral_norm, parametrizations.spectral_norm])
def test_nothing_iterates_inside_and_dropout_goes_on(normalise: object) -> None:
    """With the hook, the whole layer was in evaluation mode, and did not drop out."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    normalise(layer, "in_proj_weight")  # type: ignore[operator]
    x = torch.randn(2, 3, 8)
    layer(x, x, x)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    assert before
    with no_iteration(iterated_modules(layer)):
        outputs = [layer(x, x, x)[0] for _ in range(2)]
        weight = layer.in_proj_weight
    assert all(torch.equal(before[name], buffer) for name, buffer in layer.named_buffers())
    assert not torch.equal(*outputs), "it drops out"
    assert float(torch.linalg.matrix_norm(weight.detach(), 2)) < 3, "it is normalised"
    layer(x, x, x)
    assert not all(torch.equal(before[name], buffer) for name, buffer in layer.named_buffers())
