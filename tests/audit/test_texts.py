"""The first text of any rank reaches all of them."""

import torch

from echelon.audit.texts import first_text, gather_rows
from echelon.collectives import Group
from tests.thread_ranks import ThreadGroup, run_threads

CPU = torch.device("cpu")


def spoken(texts: list[str]) -> list[str]:
    def speak(group: Group) -> str:
        assert isinstance(group, ThreadGroup)
        text = first_text(texts[group.rank], group, CPU)
        assert group.subjects == ["checks"] * (2 if any(texts) else 1)
        return text

    return run_threads(len(texts), speak)


def test_the_first_rank_that_says_something_is_heard_by_all() -> None:
    assert spoken(["", "zwölf · α", "a longer text that nobody hears"]) == ["zwölf · α"] * 3
    assert spoken(["one", ""]) == ["one"] * 2
    assert spoken(["", ""]) == [""] * 2


def test_rows_are_gathered_in_the_order_of_ranks_whatever_their_layout() -> None:
    def gather(group: Group) -> list[object]:
        local = torch.arange(6).view(2, 3).t() + 10 * group.rank  # not contiguous
        return gather_rows(local, group).tolist()  # type: ignore[no-any-return]

    rows = [[[0, 3], [1, 4], [2, 5]], [[10, 13], [11, 14], [12, 15]]]
    assert run_threads(2, gather) == [rows] * 2
