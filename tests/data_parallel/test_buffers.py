"""Which buffers replicas send to each other."""

from collections.abc import Callable

import torch
from torch import nn

from echelon.collectives import RecordingGroup
from echelon.data_parallel.buffers import Buffers
from echelon.launching import Ranks
from echelon.mesh import Mesh
from echelon.plan import Plan


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)  # three buffers, which its kernels change without a mark
        self.register_buffer("table", torch.zeros(5))
        self.register_buffer("counter", torch.zeros(()))


def num_sent(group: RecordingGroup) -> int:
    count = sum(move.operation == "broadcast" for move in group.ledger.moves)
    group.ledger.start_step()
    return count


def test_only_what_a_step_may_have_changed_is_sent() -> None:
    model, group = Model(), RecordingGroup("data", 0, 2)
    buffers = Buffers(model, group)
    buffers.share()
    assert num_sent(group) == 3, "running statistics, always"
    model.table.add_(1.0)
    model.counter = torch.ones(())  # another tensor in its place
    buffers.share()
    assert num_sent(group) == 5
    buffers.share()
    assert num_sent(group) == 3, "what was sent is not sent again"


def test_one_replica_or_no_buffers_send_nothing() -> None:
    alone, group = RecordingGroup("data"), RecordingGroup("data", 0, 2)
    Buffers(Model(), alone).share()
    Buffers(nn.Linear(2, 2), group).share()
    assert alone.ledger.moves == group.ledger.moves == []


def changed_on_the_second_rank() -> float:
    model, mesh = Model(), Mesh.join(Plan(data=2))
    buffers = Buffers(model, mesh.group("data"))
    if mesh.rank == 1:
        model.table.fill_(5.0)
    buffers.share()
    return float(model.table.sum())


def test_what_one_replica_alone_has_changed_is_that_of_the_first_again(
    warm_ranks: Callable[[int], Ranks],
) -> None:
    assert warm_ranks(2).run(changed_on_the_second_rank) == [0.0, 0.0]
