"""Weights that are no numbers are named before the first step."""

import pytest
import torch
from torch import Tensor

from echelon.audit.agreement import RankAgreement
from echelon.audit.finite_weights import FiniteWeights
from echelon.audit.report import held
from echelon.errors import UserError
from echelon.ownership import OwnedSlice, whole_slice

AGREEMENT = RankAgreement(None, torch.device("cpu"))


def entry(**weights: Tensor) -> FiniteWeights:
    owned = [OwnedSlice(whole_slice(name, tensor), tensor) for name, tensor in weights.items()]
    return FiniteWeights(lambda: owned, frozenset({"trained"}), AGREEMENT)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_trained_weight_must_be_finite(number: float) -> None:
    with pytest.raises(UserError, match=r"NaN or infinite before the first step: trained, on rank 0; init"):
        entry(trained=torch.tensor([1.0, number]), frozen=torch.ones(2))()


def test_a_frozen_mask_may_be_infinite_but_is_a_number() -> None:
    infinite = torch.tensor([-float("inf"), 0.0])
    assert entry(trained=torch.ones(2), frozen=infinite, index=torch.ones(1, dtype=torch.int64))() == held(
        "finite weights"
    )
    with pytest.raises(UserError, match="frozen"):
        entry(frozen=infinite * 0)()
