"""Weights that are no numbers are named before the first step."""

import pytest
import torch
from torch import Tensor

from echelon.collectives.agreement import RankAgreement
from echelon.engine.audit.finite_weights import check_finite_weights
from echelon.engine.audit.report import AuditResult, held
from echelon.errors import UserError
from echelon.state.ownership import OwnedSlice, whole_slice

AGREEMENT = RankAgreement(None, torch.device("cpu"))


def check(**weights: Tensor) -> AuditResult:
    owned = [OwnedSlice(whole_slice(name, tensor), tensor) for name, tensor in weights.items()]
    return check_finite_weights(owned, frozenset({"trained"}), AGREEMENT)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_trained_weight_must_be_finite(number: float) -> None:
    with pytest.raises(UserError, match=r"NaN or infinite before the first step: trained, on rank 0; init"):
        check(trained=torch.tensor([1.0, number]), frozen=torch.ones(2))


def test_a_frozen_mask_may_be_infinite_but_is_a_number() -> None:
    infinite = torch.tensor([-float("inf"), 0.0])
    assert check(trained=torch.ones(2), frozen=infinite, index=torch.ones(1, dtype=torch.int64)) == held(
        "finite weights"
    )
    with pytest.raises(UserError, match="frozen"):
        check(frozen=infinite * 0)


@pytest.mark.parametrize(
    ("count", "named"), [(5, "w0, w1, w2, w3, w4, on"), (7, "w0, w1, w2, w3, w4 and 2 more, on")]
)
def test_five_weights_are_named_each_once(count: int, named: str) -> None:
    nan = torch.tensor([float("nan")])
    owned = [OwnedSlice(whole_slice(f"w{k}", nan), nan) for k in range(count) for _ in range(2)]
    with pytest.raises(UserError, match=f"before the first step: {named} rank 0"):
        check_finite_weights(owned, frozenset(), AGREEMENT)


def test_complex_weights_are_looked_at_and_nothing_at_all_is_finite() -> None:
    with pytest.raises(UserError, match="trained"):
        check(trained=torch.tensor([complex(0, float("inf"))]))
    assert check(index=torch.ones(1, dtype=torch.int64)) == held("finite weights")
