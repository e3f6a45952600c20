"""Buffers among replicas: those of replica 0 are everyone's, and only what changed is sent."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.collectives import Group, Ledger, RecordingGroup, group_over
from echelon.launching import Ranks
from echelon.parallel.data import buffers as buffers_module
from echelon.parallel.data.buffers import Buffers, broadcast_packed
from tests.cases import adamw, mean_loss, vectors
from tests.reads import HasReadError, no_reads
from tests.thread_ranks import run_threads

Warm = Callable[[int], Ranks]


class Counters(nn.Module):
    """Two buffers that change only when somebody changes them."""

    first: Tensor
    second: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(2))
        self.register_buffer("second", torch.zeros(3), persistent=False)


def sent(group: RecordingGroup) -> list[int]:
    """The sizes of what was broadcast."""
    return [move.traffic.payload // 4 for move in group.ledger.moves if move.operation == "broadcast"]


def test_only_what_changed_since_the_last_time_is_sent() -> None:
    group, module = RecordingGroup("data", 0, 2), Counters()
    buffers = Buffers(module, group)
    buffers.share()
    assert sent(group) == []
    module.second.add_(1)
    buffers.share()
    assert sent(group) == [3]
    buffers.share()
    assert sent(group) == [3], "a change is sent once"
    module.first = module.first + 1  # assigned, and not changed in place
    buffers.share()
    assert sent(group) == [3, 2]
    assert {move.subject for move in group.ledger.moves} == {"buffers"}


def test_a_buffer_that_was_none_is_sent_and_one_that_takes_its_place_too() -> None:
    group, module = RecordingGroup("data", 0, 2), Counters()
    module.register_buffer("later", None)
    buffers = Buffers(module, group)
    module.later = torch.zeros(7)
    buffers.share()
    assert sent(group) == [7]
    for _ in range(3):  # the second may be where the first was in memory
        module.later = None
        module.later = torch.zeros(7)
        buffers.share()
    assert sent(group) == [7] * 4


def test_small_buffers_are_sent_without_asking_where_that_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    group, module = RecordingGroup("data", 0, 2), Counters()
    with no_reads():
        Buffers(module, group, asks=False).share()
    assert sent(group) == [5], "one message for all of a type"
    assert {move.operation for move in group.ledger.moves} == {"broadcast"}
    monkeypatch.setattr(buffers_module, "SMALL", 19)  # bytes; they have 20
    with no_reads(), pytest.raises(HasReadError):
        Buffers(module, group, asks=False).share()


def test_running_statistics_are_always_sent() -> None:
    """Their kernels leave no mark on the tensor's version."""
    group, module = RecordingGroup("data", 0, 2), nn.BatchNorm1d(2)
    Buffers(module, group).share()
    assert sent(group) == [4, 2], "mean and variance; the counter, an integer of 8 bytes"
    group, module = RecordingGroup("data", 0, 2), nn.BatchNorm1d(2, track_running_stats=False)
    Buffers(module, group).share()
    assert sent(group) == []


def test_one_replica_and_no_buffers_have_nothing_to_share() -> None:
    for group, module in ((RecordingGroup("data"), Counters()), (RecordingGroup("data", 0, 2), nn.Tanh())):
        Buffers(module, group).share()
        assert group.ledger.moves == []


def changed_on(changing: int) -> tuple[list[float], list[float], int]:
    """Buffers after rank `changing` alone has changed one; the second one does not lie in one piece."""
    group = group_over("data", torch.distributed.group.WORLD, Ledger())
    module = Counters()
    module.second = torch.zeros(6)[::2]
    buffers = Buffers(module, group)
    if group.rank == changing:
        module.second.fill_(10.0 + group.rank)
    memory = module.second
    buffers.share()
    assert module.second is memory, "the buffer keeps its identity"
    broadcasts = sum(move.operation == "broadcast" for move in group.ledger.moves)
    return module.first.tolist(), module.second.tolist(), broadcasts


@pytest.mark.parametrize(("changing", "value"), [(0, 10.0), (1, 0.0)])
def test_every_replica_has_those_of_replica_0_whoever_changed_them(
    warm_ranks: Warm, changing: int, value: float
) -> None:
    for result in warm_ranks(2).run(changed_on, changing):
        assert result == ([0.0, 0.0], [value] * 3, 1)


def broadcast_of_own() -> list[list[float]]:
    group = group_over("data", torch.distributed.group.WORLD, Ledger())
    tensors = [torch.full((2, 3), float(group.rank)), torch.full((3, 2), float(group.rank)).t()]
    broadcast_packed(tensors, group)
    return [tensor.flatten().tolist() for tensor in tensors]


def test_a_broadcast_reaches_tensors_however_they_lie_in_memory(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(broadcast_of_own) == [[[0.0] * 6] * 2] * 2


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x))  # type: ignore[no-any-return]


def running_mean() -> Tensor:
    torch.manual_seed(0)
    engine = echelon.parallelize(Normalised(), "data=2", optimizer=adamw, loss=mean_loss)
    for step in range(3):
        engine.step(engine.local(vectors(step)))
    return engine.module.get_buffer("norm.running_mean").clone()  # and not replica 0's, as when it is saved


def test_running_statistics_are_replica_zeros_on_every_rank(warm_ranks: Warm) -> None:
    first, second = warm_ranks(2).run(running_mean)
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.zeros(6))


class Averaging(nn.Module):
    """Assigns its buffer instead of changing it: replicas kept the old one in mind."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return self.last(x)  # type: ignore[no-any-return]

    def get_extra_state(self) -> dict[str, int]:
        return {"answer": 42}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def trained(level: int) -> tuple[dict[str, object], dict[str, int]]:
    torch.manual_seed(0)
    engine = echelon.parallelize(
        Averaging(), f"data=2 zero={level}", optimizer=adamw, loss=mean_loss, smallest_unit=0, audit="off"
    )
    for step in range(3):
        engine.step(engine.local(vectors(step)))
    return engine.full_state_dict(), engine.memory().now


@pytest.mark.parametrize("level", [0, 2, 3])
def test_buffers_that_are_assigned_are_shared_and_extra_state_is_kept(warm_ranks: Warm, level: int) -> None:
    (first, memory), (second, _) = warm_ranks(2).run(trained, level)
    assert isinstance(first["average"], Tensor)
    assert torch.equal(first["average"], second["average"])  # type: ignore[arg-type]
    assert first["_extra_state"] == {"answer": 42}
    assert memory["activations"] == 0, "what was gathered is no activation"


# Many tensors in few messages: their values are rank 0's, and no message is larger than the buffer.


def tensors(rank: int) -> list[Tensor]:
    """Of two types, one not contiguous, one without elements, one a number, one larger than the buffer."""
    base = 100.0 * rank
    return [
        torch.arange(3.0) + base,
        torch.arange(4, dtype=torch.int64) + 100 * rank,
        (torch.arange(6.0) + base).view(2, 3).t(),
        torch.empty(0),
        torch.tensor(base),
        torch.arange(40.0).view(5, 8) + base,
    ]


def test_everybody_has_rank_0_s_values_however_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(group: Group) -> list[int]:
        own = tensors(group.rank)
        strides = [tensor.stride() for tensor in own]
        broadcast_packed(own, group)
        assert all(map(torch.equal, own, tensors(0)))
        assert [tensor.stride() for tensor in own] == strides
        return [move.traffic.payload for move in group.ledger.moves]

    assert run_threads(2, run) == [[(3 + 6 + 1 + 40) * 4, 4 * 8]] * 2
    monkeypatch.setattr(buffers_module, "BYTES_AT_ONCE", 64)
    assert run_threads(2, run) == [[40, 64, 64, 32, 32]] * 2
    monkeypatch.setattr(buffers_module, "BYTES_AT_ONCE", 40)
    assert run_threads(2, run) == [[40, *[32] * 5, 32]] * 2, "exactly the limit is one message"


def test_a_tensor_with_more_than_a_buffer_in_a_row_is_cut_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers_module, "BYTES_AT_ONCE", 16)

    def sizes(*shape: int) -> list[list[int]]:
        tensor = torch.zeros(shape)
        return [[each.numel() for each in portion] for portion in buffers_module._portions([tensor])]

    assert sizes(2, 6) == [[4], [2], [4], [2]]
    assert sizes(1, 1, 5) == [[4], [1]]
    assert sizes(4) == [[4]]
    monkeypatch.setattr(buffers_module, "BYTES_AT_ONCE", 1)
    assert sizes(2, 1) == [[1], [1]], "one element, however large"


def test_the_buffer_is_32_mib() -> None:
    assert buffers_module.BYTES_AT_ONCE == 2**25
