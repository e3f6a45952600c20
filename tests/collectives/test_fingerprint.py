"""Fingerprints: equal bits have equal ones, and every small change shows."""

import pytest
import torch

from echelon.collectives import fingerprint as module
from echelon.collectives.fingerprint import fingerprint, wrapped

DTYPES = [torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_tensors_have_equal_fingerprints_whatever_their_layout(dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 4).to(dtype)
    turned = tensor.t().contiguous().t()
    assert fingerprint(tensor) == fingerprint(turned) == fingerprint(tensor.clone())


def test_one_bit_one_place_and_one_sign_show() -> None:
    tensor = torch.tensor([1.0, 2.0, 0.0])
    others = [
        torch.tensor([2.0, 1.0, 0.0]),
        torch.tensor([1.0, 2.0, -0.0]),
        torch.nextafter(tensor, torch.full((3,), 3.0)),
    ]
    assert len({fingerprint(each) for each in (tensor, *others)}) == 4


def test_a_large_tensor_is_summed_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, dtype=torch.float64)
    whole = fingerprint(tensor)
    monkeypatch.setattr(module, "_AT_ONCE_ON_CPU", 64)
    assert fingerprint(tensor) == whole


def test_the_sums_are_those_of_64_bits() -> None:
    tensor = torch.tensor([2**62, 2**62, 3])
    assert fingerprint(tensor) == (-(2**63) + 3, wrapped(2**62 + 2 * 2**62 + 9))
    assert [wrapped(n) for n in (0, 2**63, -(2**63), 2**64 + 5, -1)] == [0, -(2**63), -(2**63), 5, -1]
