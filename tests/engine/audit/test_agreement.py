"""Ranks decide together, and one rank for itself; in a step: tests/engine/audit/test_auditing.py."""

import pytest
import torch

from echelon.collectives import Group
from echelon.engine.audit.agreement import RankAgreement
from echelon.errors import UserError
from tests.thread_ranks import ThreadGroup, run_threads

CPU = torch.device("cpu")


def refuse() -> None:
    raise UserError("no")


def test_a_single_rank_agrees_with_itself() -> None:
    agreement = RankAgreement(None, CPU)
    assert agreement.rank == 0
    assert agreement.least(3, -2) == [3, -2]
    assert agreement.any(True, False) == [True, False]
    assert agreement.gather({"a": (1, 2)}) == [{"a": [1, 2]}]
    assert torch.equal(agreement.largest(torch.tensor([2, 5])), torch.tensor([2, 5]))
    with pytest.raises(UserError, match="no"):
        agreement.check(refuse)


def test_only_a_device_is_late() -> None:
    assert RankAgreement(None, torch.device("cuda")).is_late is True
    assert RankAgreement(None, CPU).is_late is False


def answers(group: Group) -> list[object]:
    assert isinstance(group, ThreadGroup)
    rank, agreement = group.rank, RankAgreement(group, CPU)
    said: list[object] = [
        agreement.rank,
        agreement.least(rank, 7 - rank, -rank),
        agreement.any(rank == 1, False, True),
        agreement.largest(torch.tensor([rank, -rank])).tolist(),
        agreement.gather({"rank": "longer" * rank, "list": [1, None]}),
    ]
    assert set(group.subjects) == {"checks"}
    return said


def test_ranks_agree_on_the_smallest_the_largest_and_what_each_says() -> None:
    said = [[0, 5, -2], [True, False, True], [2, 0]]
    gathered = [{"rank": text, "list": [1, None]} for text in ("", "longer", "longerlonger")]
    assert run_threads(3, answers) == [[rank, *said, gathered] for rank in range(3)]


def test_without_a_process_group_a_rank_of_a_group_checks_too() -> None:
    agreement = RankAgreement(run_threads(1, lambda group: group)[0], CPU)
    with pytest.raises(UserError, match="no"):
        agreement.check(refuse)
