"""Which layer is a head, and when its logits wait."""

import copy

import pytest
import torch
from torch import nn

from echelon.nn.float8 import Float8Linear
from echelon.nn.head.deferred import is_deferred
from echelon.nn.head.wrapper import Deferral, DeferredHead, find_head
from echelon.nn.wrapping import Wrapping


def model(columns: int = 2000) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, columns))


def test_the_last_linear_layer_of_many_columns_is_the_head() -> None:
    module = model()
    assert find_head(module) is module[3]
    assert find_head(model(columns=10)) is None
    assert find_head(nn.Sequential(nn.ReLU())) is None


def test_a_layer_that_is_called_in_another_way_is_none() -> None:
    class Capped(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).tanh()

    assert find_head(nn.Sequential(Capped(4, 2000))) is None
    module = model()
    module[3].forward = lambda x: x  # type: ignore[method-assign]
    assert find_head(module) is None


def test_a_matrix_that_is_multiplied_in_8_bits_is_none() -> None:
    """A loss that takes its weight would multiply in 16."""
    module = model()
    with Wrapping() as wrapping:
        wrapping.wrap(Float8Linear(module[3], None))  # type: ignore[arg-type]
        assert find_head(module) is None
    assert find_head(module) is module[3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_wait_where_that_is_allowed(dtype: torch.dtype) -> None:
    module, deferral = model().to(dtype), Deferral(differentiates=True)
    with Wrapping() as wrapping:
        wrapping.wrap(DeferredHead(module[3], deferral, compiled=False))
        tokens = torch.tensor([[1, 2]])
        expected = module(tokens)
        assert not is_deferred(expected)
        deferral.is_allowed = True
        found = module(tokens)
        assert is_deferred(found)
        assert torch.equal(found + 0, expected)
        with torch.autocast("cpu"):
            assert not is_deferred(module[3](torch.ones(1, 2, 4, dtype=dtype)))
        with torch.no_grad():  # as in a checkpoint, which calls it again
            assert not is_deferred(module(tokens))
        deferral.is_allowed = False
        assert torch.equal(copy.deepcopy(module)(tokens), expected)
        deferral.is_allowed = True
    assert not is_deferred(module(tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_in_more_precise_types_are_plain_torch_s(dtype: torch.dtype) -> None:
    module, deferral = model().to(dtype), Deferral(is_allowed=True, differentiates=True)
    with Wrapping() as wrapping:
        wrapping.wrap(DeferredHead(module[3], deferral, compiled=False))
        assert not is_deferred(module(torch.tensor([[1, 2]])))
