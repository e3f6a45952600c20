"""Buffers of replicas that are threads: what is sent, and what differs. Trainings: test_buffers.py."""

import pytest
import torch
from torch import nn

from echelon.collectives import Group
from echelon.parallel.data import buffers
from echelon.parallel.data.buffers import Buffers
from tests.thread_ranks import ThreadGroup, run_threads


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))


def moved(group: Group) -> list[tuple[str, int]]:
    assert isinstance(group, ThreadGroup)
    moves = [(move.operation, move.traffic.payload) for move in group.ledger.moves]
    assert set(group.subjects) <= {"buffers"}
    group.ledger.start_step()
    return moves


def test_what_any_replica_may_have_changed_is_sent() -> None:
    def run(group: Group) -> list[list[tuple[str, int]]]:
        model = Counting()
        shared = Buffers(model, group)
        found = []
        shared.share()
        found.append(moved(group))
        if group.rank == 1:
            model.calls += 5
        shared.share()
        found.append(moved(group))
        assert model.calls == 0, "rank 0's count"
        if group.rank == 0:
            model.table = torch.ones(4)  # another tensor
        shared.share()
        found.append(moved(group))
        assert torch.equal(model.table, torch.ones(4))
        shared.share()
        found.append(moved(group))
        return found

    ask, norm = ("all_reduce", 5), [("broadcast", 2 * 2 * 4), ("broadcast", 8)]
    with_calls, with_table = [("broadcast", 16), ("broadcast", 16)], [("broadcast", 32), ("broadcast", 8)]
    assert run_threads(2, run) == [[[ask, *norm], [ask, *with_calls], [ask, *with_table], [ask, *norm]]] * 2


@pytest.mark.parametrize(
    ("small", "asks"), [(24, [("broadcast", 16), ("broadcast", 8)]), (23, [("all_reduce", 2)])]
)
def test_small_buffers_are_sent_without_a_question_where_asking_would_wait(
    small: int, asks: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert buffers.SMALL == 2**20
    monkeypatch.setattr(buffers, "SMALL", small)

    def run(group: Group) -> list[tuple[str, int]]:
        model = Counting()
        del model.norm
        Buffers(model, group, asks=False).share()
        return moved(group)

    assert run_threads(2, run) == [asks] * 2
    assert run_threads(1, run) == [[]]


def test_replicas_that_have_run_are_compared() -> None:
    def run(group: Group) -> list[list[str]]:
        model = Counting()
        shared = Buffers(model, group)
        found = [shared.differing(has_run=True)]
        if group.rank == 1:
            model.calls += 1
            model.norm.running_mean[0] = 3
        found.append(shared.differing(has_run=True))
        found.append(shared.differing(has_run=group.rank != 1))
        found.append(shared.differing(has_run=group.rank == 1))
        assert {move.subject for move in group.ledger.moves} <= {"checks"}
        return found

    differing = ["calls", "norm.running_mean"]
    assert [sorted(each) for each in run_threads(3, run)[0]] == [[], differing, [], []]
    assert run_threads(1, run) == [[[]] * 4]


def test_large_buffers_that_nobody_has_changed_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "SMALL", 15)

    def run(group: Group) -> list[list[str]]:
        model = Counting()
        shared = Buffers(model, group)
        model.table.data += group.rank  # leaves no mark
        first = shared.differing(has_run=True)
        model.table += 0
        return [first, shared.differing(has_run=True)]

    assert run_threads(2, run) == [[[], ["table"]]] * 2
    monkeypatch.setattr(buffers, "SMALL", 16)
    assert run_threads(2, run) == [[["table"], ["table"]]] * 2
    assert Buffers(nn.Linear(1, 1), run_threads(1, lambda group: group)[0]).differing(has_run=True) == []


def test_statistics_that_are_not_tracked_are_none() -> None:
    norm = nn.BatchNorm1d(2, track_running_stats=False)
    assert Buffers(norm, run_threads(1, lambda group: group)[0])._statistics == set()
    assert len(Buffers(Counting(), run_threads(1, lambda group: group)[0])._statistics) == 3
