"""Encodings by themselves: what comes back, and how far it is from what went in."""

import pytest
import torch

from echelon.memory.gist import floats

# The largest relative error of a number that is far from the smallest ones of its format.
ERRORS = {"fp16": 2.0**-11, "fp10": 2.0**-5 * 1.02, "fp8": 2.0**-4}


@pytest.mark.parametrize("name", floats.FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_rounded_to_their_format(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    flat = (torch.rand(10001) + 0.5).mul(torch.where(torch.rand(10001) < 0.5, -3.0, 3.0)).to(dtype)
    parts = floats.encode(flat, name)
    again = floats.decode(parts, name, len(flat), dtype)
    error = ((again - flat) / flat).double().abs().max()
    assert error <= ERRORS[name] + torch.finfo(dtype).eps
    assert dtype != torch.float32 or error > ERRORS[name] / 2
    assert sum(part.nbytes for part in parts) <= floats._BYTES[name] * (len(flat) + floats.BLOCK)
    assert torch.equal(floats.decode(floats.encode(again, name), name, len(flat), dtype), again)


@pytest.mark.parametrize("name", floats.FORMATS)
def test_large_numbers_saturate_and_nan_stays(name: str) -> None:
    flat = torch.tensor([1e30, -1e30, float("inf"), float("nan"), 0.0, 1e-30])
    again = floats.decode(floats.encode(flat, name), name, len(flat), torch.float32)
    assert again[:3].isfinite().all()
    assert all(again[[0, 2]] > 6e4)
    assert again[1] < -6e4
    assert again[3].isnan()
    assert again[4] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", floats.FORMATS)
def test_the_largest_numbers_stay_finite(name: str, dtype: torch.dtype) -> None:
    flat = torch.finfo(dtype).max * torch.linspace(-1, 1, 256, dtype=torch.float64).to(dtype)
    again = floats.decode(floats.encode(flat, name), name, len(flat), dtype)
    assert again.isfinite().all()
    if name == "fp8":
        torch.testing.assert_close(again[[0, -1]], flat[[0, -1]], rtol=2.0**-4, atol=0)


@pytest.mark.parametrize("name", ["fp10", "fp8"])
def test_what_is_encoded_stays_as_it_is(name: str) -> None:
    """Also infinite numbers of fp16, which the forward pass goes on with."""
    flat = torch.tensor([float("inf"), 1.0, -float("inf")], dtype=torch.float16)
    before = flat.clone()
    floats.encode(flat, name)
    assert torch.equal(flat, before)


def test_fp8_scales_every_block_by_itself() -> None:
    flat = torch.cat([torch.full((128,), 1e-20), torch.full((128,), 1e20), torch.zeros(5)])
    again = floats.decode(floats.encode(flat, "fp8"), "fp8", len(flat), torch.float32)
    assert torch.allclose(again, flat, rtol=2.0**-4, atol=0)


def test_float64_keeps_all_bits() -> None:
    flat = torch.randn(100, dtype=torch.float64)
    assert floats.format_for(torch.float64, "fp8") == floats.EXACT
    parts = floats.encode(flat, floats.EXACT)
    flat_before = flat.clone()
    flat.zero_()
    assert torch.equal(floats.decode(parts, floats.EXACT, 100, torch.float64), flat_before)


def test_a_format_that_is_not_smaller_is_not_used() -> None:
    assert floats.format_for(torch.bfloat16, "fp16") is None
    assert floats.format_for(torch.bfloat16, "fp10") == "fp10"
    assert floats.format_for(torch.int32, "fp8") is None
