"""One rank decides for itself; with others, see tests/engine/test_sample_audit.py."""

import pytest
import torch

from echelon.audit.agreement import RankAgreement
from echelon.errors import UserError


def refuse() -> None:
    raise UserError("no")


def test_a_single_rank_agrees_with_itself() -> None:
    agreement = RankAgreement(None, torch.device("cpu"))
    assert agreement.least(3, -2) == [3, -2]
    assert agreement.any(True, False) == [True, False]
    assert agreement.gather({"a": (1, 2)}) == [{"a": [1, 2]}]
    with pytest.raises(UserError, match="no"):
        agreement.check(refuse)
