"""Logits of gates: in float32 at least, also of tokens in other types."""

import pytest
import torch

from echelon.nn.experts.gates import router
from echelon.nn.experts.gates.router import router_logits


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]
)
def test_logits_are_in_float32_at_least(dtype: torch.dtype, expected: torch.dtype) -> None:
    x, weight = torch.randn(2, 3, 8).to(dtype), torch.randn(4, 8).to(dtype)
    logits = router_logits(x, weight)
    assert logits.dtype == expected
    torch.testing.assert_close(logits, x.to(expected) @ weight.to(expected).T)


def test_autocast_does_not_round_them() -> None:
    x, weight = torch.randn(2, 3, 8), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        logits = router_logits(x, weight)
    torch.testing.assert_close(logits, x @ weight.T)


def test_the_product_of_16_bits_has_the_gradients_of_one_in_float32() -> None:
    """Rounded to 16 bits: what runs on a CUDA device, here with torch's own product."""
    torch.manual_seed(0)
    x = torch.randn(30, 8).bfloat16().requires_grad_()
    weight = torch.randn(4, 8).bfloat16().requires_grad_()
    gradient = torch.randn(30, 4)
    logits = router._Product.apply(x, weight)  # type: ignore[no-untyped-call]
    expected = x.float() @ weight.float().T
    torch.testing.assert_close(logits, expected)
    found = torch.autograd.grad(logits, [x, weight], gradient)
    for one, other in zip(found, torch.autograd.grad(expected, [x, weight], gradient), strict=True):
        assert one.dtype == torch.bfloat16
        assert float((one - other).float().norm() / other.float().norm()) < 1e-2
