"""Buffers before a step: what comes back where the step was refused, and what is copied at all."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import RecordingGroup
from echelon.nn import forward_state
from echelon.nn.forward_state import BufferSnapshot, ChangedBuffers
from echelon.parallel.data.buffers import Buffers
from tests.reads import HasReadError, no_reads


class Counting(nn.Module):
    """Buffers of many kinds."""

    table: Tensor
    count: Tensor
    average: Tensor
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.arange(6.0).view(2, 3).t())  # never changed; not in one piece
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(2, 1), persistent=False)
        self.register_buffer("expanded", torch.ones(1).expand(4))
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.average = 0.5 * self.average + x.mean(0)  # assigned, not changed
        self.cache[0, 0] += 1
        return self.norm(x)  # type: ignore[no-any-return]

    def values(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.named_buffers()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def inputs() -> Tensor:
    return torch.tensor([[1.0, 2.0, 3.0], [4.0, float("nan"), 1.0]])


def flag(value: bool) -> Tensor:
    return torch.tensor(value)


@pytest.mark.parametrize("as_flag", [bool, flag])
@pytest.mark.parametrize("refused", [False, True])
def test_buffers_come_back_where_a_step_was_refused(
    refused: bool, as_flag: Callable[[bool], bool | Tensor]
) -> None:
    model = Counting()
    snapshot = BufferSnapshot([model])
    verdict = as_flag(refused)
    for _ in range(2):
        snapshot.take()
        before = model.values()
        model(inputs())
        after = model.values()
        assert not same(before, after)
        with no_reads():
            snapshot.restore(verdict)
        expected = {name: before[name] if refused else after[name] for name in before}
        for name, value in model.values().items():
            assert torch.equal(value.nan_to_num(7.0), expected[name].nan_to_num(7.0)), name


def test_what_the_user_sets_between_steps_is_what_comes_back() -> None:
    model = Counting()
    snapshot = BufferSnapshot([model])
    for value in (5.0, 6.0):
        model.norm.running_mean.fill_(value)  # type: ignore[union-attr]
        model.count.fill_(int(value))
        snapshot.take()
        model(inputs())
        snapshot.restore(True)
        assert model.norm.running_mean.tolist() == [value] * 3  # type: ignore[union-attr]
        assert model.count.item() == int(value)


@pytest.mark.parametrize("replacement", [torch.ones(3, 2), torch.ones(2, 1).to_sparse(), None])
def test_a_buffer_of_another_form_comes_back_and_only_then_the_flag_is_read(
    replacement: Tensor | None,
) -> None:
    model = Counting()
    cache, snapshot = model.cache, BufferSnapshot([model])

    def replace() -> None:
        model.cache = cache
        snapshot.take()
        model.cache = replacement  # type: ignore[assignment]

    replace()
    with no_reads(), pytest.raises(HasReadError):
        snapshot.restore(flag(True))
    replace()
    snapshot.restore(flag(False))
    assert model.cache is replacement
    for verdict in (True, flag(True)):
        replace()
        snapshot.restore(verdict)
        assert torch.equal(model.cache, torch.zeros(2, 1))


@pytest.mark.parametrize("verdict", [True, flag(True)])
def test_changes_without_a_mark_come_back(verdict: bool | Tensor) -> None:
    # Only floating-point vectors did; code of vector quantisation changes matrices by their `.data`.
    model = Counting()
    snapshot = BufferSnapshot([model])
    snapshot.take()
    before, versions = model.values(), [buffer._version for buffer in model.buffers()]
    model.table.data.mul_(3)
    model.count.data.add_(1)
    assert [buffer._version for buffer in model.buffers()] == versions
    snapshot.restore(verdict)
    assert same(model.values(), before)


@pytest.mark.parametrize("verdict", [False, True, flag(False), flag(True)])
def test_only_what_a_step_changed_is_sent_to_replicas(verdict: bool | Tensor) -> None:
    # Every vector was written to in every step on a GPU, so that constants were sent in each.
    module = nn.Module()
    module.register_buffer("constant", torch.ones(3))
    module.register_buffer("count", torch.zeros(2))
    group = RecordingGroup("data", 0, 2)
    snapshot, buffers = BufferSnapshot([module]), Buffers(module, group, asks=True)
    for _ in range(2):
        snapshot.take()
        module.count.add_(1)
        snapshot.restore(verdict)
        buffers.share()
    sent = [move.traffic.payload for move in group.ledger.moves if move.operation == "broadcast"]
    assert sent == [2 * 4] * 2


@pytest.mark.parametrize("verdict", [False, True, flag(False), flag(True)])
@pytest.mark.parametrize("by_data", [False, True])
def test_a_buffer_that_is_a_view_of_the_batch_leaves_the_batch_alone(
    verdict: bool | Tensor, by_data: bool
) -> None:
    model = Counting()
    snapshot = BufferSnapshot([model])
    batch = torch.full((4, 1), 5.0)
    snapshot.take()
    if by_data:
        model.cache.data = batch[:2]
    else:
        model.cache = batch[:2]
    with no_reads():
        snapshot.restore(verdict)
    assert batch.tolist() == [[5.0]] * 4
    assert model.cache.tolist() == [[0.0 if verdict else 5.0]] * 2
    if verdict:
        model.cache.add_(1)
        assert batch.tolist() == [[5.0]] * 4
        snapshot.take()
        model.cache.add_(1)
        snapshot.restore(True)
        assert model.cache.tolist() == [[1.0]] * 2, "what came back is not the copy itself"


@pytest.mark.parametrize("verdict", [True, flag(True)])
def test_a_buffer_that_changes_its_shape_in_place_comes_back(verdict: bool | Tensor) -> None:
    model = Counting()
    snapshot = BufferSnapshot([model])
    snapshot.take()
    model.cache.t_().add_(1)
    snapshot.restore(verdict)
    assert torch.equal(model.cache, torch.zeros(2, 1))


@pytest.mark.parametrize("verdict", [True, flag(True)])
@pytest.mark.parametrize("kind", ["sparse", "meta", "quantised"])
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # is deprecated from torch 2.13 on
def test_a_buffer_that_cannot_be_copied_is_put_back_where_it_was_reassigned(
    kind: str, verdict: bool | Tensor
) -> None:
    buffer = torch.ones(2, 2, device="meta" if kind == "meta" else None)
    if kind == "sparse":
        buffer = buffer.to_sparse()
    if kind == "quantised":
        buffer = torch.quantize_per_tensor(buffer, 0.5, 0, torch.qint8)
    module = nn.Module()
    module.register_buffer("buffer", buffer)
    snapshot = BufferSnapshot([module])
    for replacement in (buffer, buffer.clone()):
        snapshot.take()
        module.buffer = replacement
        snapshot.restore(verdict)
        assert module.buffer is buffer


@pytest.mark.parametrize("verdict", [True, flag(True)])
def test_buffers_that_come_or_go_in_a_refused_step_do_not(verdict: bool | Tensor) -> None:
    model = Counting()
    snapshot = BufferSnapshot([model])
    snapshot.take()
    before = model.values()
    model.absent = torch.ones(2)
    model.register_buffer("registered", torch.ones(2), persistent=False)
    model.cache = None  # type: ignore[assignment]
    del model.average
    snapshot.restore(verdict)
    assert model.absent is None
    assert same(model.values(), before)
    assert not hasattr(model, "registered")


def test_a_buffer_does_not_get_values_of_an_earlier_step() -> None:
    model = Counting()
    snapshot = BufferSnapshot([model])
    snapshot.take()
    snapshot.restore(False)
    model.cache = None  # type: ignore[assignment]
    snapshot.take()
    model.cache = torch.ones(2, 1)
    snapshot.restore(True)
    assert model.cache is None


def test_the_first_decision_holds() -> None:
    # A check may refuse what is done after the buffers were decided on, as the weights were.
    model = Counting()
    snapshot = BufferSnapshot([model])
    snapshot.take()
    model(torch.ones(2, 3))
    after = model.values()
    snapshot.restore(flag(False))
    snapshot.restore(True)
    assert same(model.values(), after)


@pytest.mark.parametrize("verdict", [True, flag(True)])
def test_a_large_buffer_is_not_copied_and_comes_back_where_it_was_reassigned(
    verdict: bool | Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_state, "LARGEST_COPY", 16)  # bytes; the table has 24
    model = Counting()
    snapshot = BufferSnapshot([model])
    snapshot.take()
    copied = {
        "count",
        "average",
        "cache",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    held = {buffer.data_ptr() for buffer in model.buffers()}
    sizes = {name: buffer.nbytes for name, buffer in model.named_buffers() if name in copied}
    assert sorted(t.nbytes for t in snapshot.storages() if t.data_ptr() not in held) == sorted(sizes.values())
    before = model.values()
    model.table = model.table + 1
    with no_reads():
        snapshot.restore(verdict)
    assert same(model.values(), before)


def test_copies_use_their_memory_again_and_are_let_go_with_their_buffers() -> None:
    model = Counting()
    snapshot = BufferSnapshot([model])
    addresses = []
    for _ in range(2):
        snapshot.take()
        model(torch.ones(2, 3))
        snapshot.restore(False)
        addresses.append([copy.data_ptr() for copy in snapshot.storages()])
    assert addresses[0] == addresses[1]
    assert len(addresses[0]) == 7, "neither the expanded buffer, nor one that was reassigned, is held"
    del model.table
    snapshot.take()
    snapshot.restore(False)
    assert len(snapshot.storages()) == 6


def test_a_flag_elsewhere_is_read_only_where_values_have_changed() -> None:
    model = Counting()
    snapshot = BufferSnapshot([model])
    elsewhere = torch.empty((), dtype=torch.bool, device="meta")
    snapshot.take()
    with no_reads():
        snapshot.restore(elsewhere)
    snapshot.take()
    model.count += 1
    with no_reads(), pytest.raises(HasReadError):
        snapshot.restore(elsewhere)


def test_a_kernel_chooses_among_a_limited_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_state, "LARGEST_COPY", 16)
    module = nn.Module()
    for index in range(5):
        module.register_buffer(f"buffer{index}", torch.full((2,), float(index)))
    snapshot = BufferSnapshot([module])
    snapshot.take()
    for buffer in module.buffers():
        buffer.fill_(9)
    with mock.patch.object(torch, "where", wraps=torch.where) as where:
        snapshot.restore(flag(True))
    assert [call.args[1].numel() for call in where.call_args_list] == [4, 4, 2]
    assert [buffer.tolist() for buffer in module.buffers()] == [[float(index)] * 2 for index in range(5)]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")  # torch's own
@pytest.mark.parametrize("of", [Tensor.to_sparse, Tensor.to_sparse_csr])
def test_changed_sparse_buffers_are_compared_by_places_and_values(of: Callable[[Tensor], Tensor]) -> None:
    buffers = {"same": of(torch.eye(2)), "other": of(torch.eye(2)), "dense": torch.ones(2)}
    changed = ChangedBuffers(lambda: buffers)
    buffers["other"] = of(3 * torch.eye(2).flip(0))
    buffers["dense"].add_(1)
    found = changed.now()
    assert found.keys() == {"other", "dense"}
    assert found["other"].tolist() == [0, 1, 1, 0, 3, 3]
