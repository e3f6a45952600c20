"""Ranks compare what they have by its text, and all are told the first line that differs."""

import pytest
import torch

from echelon.collectives import Group
from echelon.errors import UserError
from echelon.parallel.data.text_agreement import Difference, check_same_text, gather_texts
from tests.thread_ranks import ThreadGroup, run_threads

CPU = torch.device("cpu")


def answers(*texts: list[str]) -> list[str]:
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
    assert answers(["a", "b"], ["a", "b"], ["a", "b"]) == [""] * 3
    assert answers(["a", "b"], ["a", "b"], ["a", "c"]) == ["2|b|c"] * 3
    assert answers(["a"], ["a", "zwölf"]) == ["1|nothing more|zwölf"] * 2
    assert answers(["a", "more"], ["a"]) == ["1|more|nothing more"] * 2
    assert answers(["ab"], ["ba"]) == ["1|ab|ba"] * 2, "of the same length"


def test_texts_are_gathered_in_the_order_of_ranks() -> None:
    texts = ["one", "zwölf", ""]

    def gather(group: Group) -> list[str]:
        assert isinstance(group, ThreadGroup)
        gathered = gather_texts(texts[group.rank], group, CPU)
        assert group.subjects == ["agreement"] * 2
        return gathered

    assert run_threads(3, gather) == [texts] * 3


def test_a_difference_is_of_a_rank_and_two_lines() -> None:
    assert Difference(1, "a", "b")._asdict() == {"rank": 1, "first": "a", "other": "b"}
    with pytest.raises(AssertionError):
        run_threads(2, lambda group: group.barrier() if group.rank else group.all_reduce(torch.ones(1)))
