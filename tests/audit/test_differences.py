"""Differences: rounding is none, however small the numbers; everything else is one."""

import pytest
import torch
from torch import nn

from echelon.audit import differences
from echelon.audit.differences import beyond_rounding, compare, tolerance_inside, tolerance_of


def test_what_is_nothing_but_rounding_may_be_anything() -> None:
    """The gradient of a bias before a softmax is zero, but for rounding."""
    large, noise = torch.randn(100), torch.randn(2, 100) * 1e-7
    found = [compare("weight", large * (1 + 1e-6), large), compare("bias", *noise)]
    assert beyond_rounding(found, tolerance_of(large)) == []


def test_a_difference_of_a_part_of_the_size_is_none_of_rounding() -> None:
    exact = torch.ones(100, dtype=torch.float64)
    found = [compare("one", exact, exact), compare("other", exact * (1 + 1e-6), exact)]
    assert [each.name for each in beyond_rounding(found, tolerance_of(exact))] == ["other"]
    assert found[1].relative == pytest.approx(1e-6, rel=1e-3)


def test_infinities_and_nans_are_the_same_where_both_have_them() -> None:
    odd = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan])
    assert compare("", odd, odd).distance == 0
    assert compare("", odd, odd.flip(0)).distance == torch.inf
    assert compare("", torch.ones(1), torch.zeros(1)).relative == torch.inf


def test_large_tensors_are_compared_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = torch.randn(2, 50, dtype=torch.complex128)
    whole = compare("", one, other)
    monkeypatch.setattr(differences, "_AT_ONCE", 7)
    assert compare("", one, other)[1:] == pytest.approx(whole[1:])
    assert whole.distance == pytest.approx(float((one - other).norm()))
    assert whole.size == pytest.approx(float(other.norm()))


def test_fewer_bits_allow_more() -> None:
    types = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    tolerances = [tolerance_of(torch.zeros(1, dtype=dtype)) for dtype in types]
    assert tolerances == sorted(tolerances)
    assert tolerances[0] < 1e-7
    assert tolerances[-1] < 0.1


def test_modules_that_cast_to_float32_round_as_it_does() -> None:
    """A norm of transformers does, in a model of float64 too, and the split norm does not."""
    known = type("SomeRMSNorm", (nn.Identity,), {"__module__": "transformers.models.some.modeling_some"})
    assert tolerance_inside([nn.Sequential(nn.Linear(2, 2), known())]) > 1e-4
    assert tolerance_inside([nn.Sequential(nn.Linear(2, 2), nn.RMSNorm(2))]) == 0.0
