"""The operators of compiled layers: what torch asks of them, and the same masks."""

import pytest
import torch

from echelon.nn.dropout import keep_mask, operators
from echelon.nn.hashing import hash_of, signed

SEED, STEP, LAYER, FIRST, USED = 1, 2, 3, 4, 5
KEY = torch.tensor([signed(hash_of(SEED, STEP, LAYER)), USED])
INDICES = torch.tensor([1, 3, 5, 7])


@pytest.mark.parametrize("indices", [None, INDICES])
@pytest.mark.parametrize("part", [(0, 1), (1, 2)])
def test_masks_are_those_of_the_use(indices: torch.Tensor | None, part: tuple[int, int]) -> None:
    """Uses go on from those that the layer has had."""
    x = torch.randn(3, 4, 6, requires_grad=True)
    keep = keep_mask(SEED, STEP, LAYER, FIRST, x.shape, 0.3, "cpu", USED + 2, indices, part)
    draw = KEY, torch.tensor(FIRST), 2, 0.3, indices, *part
    output = operators.keyed_dropout(x, *draw)
    assert torch.equal(output, x * keep * (1 / (1 - 0.3)))
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(gradient, keep * (1 / (1 - 0.3)))
    assert torch.equal(operators.keep_mask(*draw, x.shape, x.device), keep)


def test_they_are_what_torch_asks_of_operators() -> None:
    x = torch.randn(3, 4, 6, requires_grad=True)
    draw = KEY, torch.tensor(FIRST), 0, 0.3, INDICES, 0, 1
    torch.library.opcheck(operators.keyed_dropout, (x, *draw))
    torch.library.opcheck(operators.keep_mask, (*draw, x.shape, x.device))


@pytest.mark.parametrize("shape", [(3, 5), (3, 3, 1)])
def test_masks_of_an_odd_number_of_elements_are_contiguous(shape: tuple[int, ...]) -> None:
    """The second half of the last hash lay between samples: compiled code asserts strides, and failed."""
    draw = KEY, torch.tensor(FIRST), 0, 0.3, None, 0, 1
    torch.library.opcheck(operators.keep_mask, (*draw, shape, torch.device("cpu")))
    assert operators.keep_mask(*draw, shape, torch.device("cpu")).is_contiguous()
