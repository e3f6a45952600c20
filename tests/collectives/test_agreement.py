"""Ranks agree on small things; through a store: tests/launching/test_store_agreement.py."""

import pytest
import torch

from echelon.collectives import Group, RecordingGroup
from echelon.collectives import agreement as module
from echelon.collectives.agreement import (
    Difference,
    RankAgreement,
    check_same_text,
    fingerprint,
    gather_rows,
    gather_values,
    is_same,
    wrapped,
)
from echelon.errors import UserError
from tests.thread_ranks import ThreadGroup, run_threads

CPU = torch.device("cpu")


def compared(*texts: list[str]) -> list[str]:
    def ask(group: Group) -> str:
        assert isinstance(group, ThreadGroup)
        try:
            check_same_text(texts[group.rank], group, CPU, lambda difference: "|".join(map(str, difference)))
        except UserError as error:
            return str(error)
        finally:
            assert set(group.subjects) == {"agreement"}
        assert len(group.subjects) == 1, "two numbers suffice"
        return ""

    return run_threads(len(texts), ask)


def test_the_first_line_that_differs_is_told_to_all() -> None:
    assert compared(["a", "b"], ["a", "b"], ["a", "b"]) == [""] * 3
    assert compared(["a", "b"], ["a", "b"], ["a", "c"]) == ["2|b|c"] * 3
    assert compared(["a"], ["a", "zwölf"]) == ["1|nothing more|zwölf"] * 2
    assert compared(["a", "more"], ["a"]) == ["1|more|nothing more"] * 2
    assert compared(["ab"], ["ba"]) == ["1|ab|ba"] * 2, "of the same length"


def test_values_are_gathered_in_the_order_of_ranks() -> None:
    values = [{"one": [1, None]}, "zwölf", (2.5,)]

    def gather(group: Group) -> list[object]:
        assert isinstance(group, ThreadGroup)
        gathered = gather_values(values[group.rank], group, CPU, "assembly")
        assert group.subjects == ["assembly"] * 2
        return gathered

    assert run_threads(3, gather) == [[{"one": [1, None]}, "zwölf", [2.5]]] * 3


def test_the_values_of_one_rank_are_as_those_of_many_and_move_nothing() -> None:
    group = RecordingGroup("data", 0, 1)
    assert gather_values({"a": (1, 2)}, group, CPU) == [{"a": [1, 2]}]
    assert list(group.ledger.moves) == []


def test_rows_are_gathered_under_their_subject() -> None:
    def gather(group: Group) -> object:
        assert isinstance(group, ThreadGroup)
        rows = gather_rows(torch.tensor([[group.rank, 0], [7, 1]]).t(), group, "checks")
        assert group.subjects == ["checks"]
        return rows.tolist()

    assert run_threads(2, gather) == [[[[0, 7], [0, 1]], [[1, 7], [0, 1]]]] * 2


def test_ranks_have_the_same_numbers_if_each_of_them_is() -> None:
    assert run_threads(3, lambda group: is_same([4, -(2**60)], group, CPU)) == [True] * 3
    assert run_threads(3, lambda group: is_same([4, int(group.rank == 1)], group, CPU)) == [False] * 3
    assert run_threads(2, lambda group: is_same([group.rank, 1 - group.rank], group, CPU)) == [False] * 2


def test_a_difference_is_of_a_rank_and_two_lines() -> None:
    assert Difference(1, "a", "b")._asdict() == {"rank": 1, "first": "a", "other": "b"}
    with pytest.raises(AssertionError):
        run_threads(2, lambda group: group.barrier() if group.rank else group.all_reduce(torch.ones(1)))


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
