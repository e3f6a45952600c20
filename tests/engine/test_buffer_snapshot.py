"""Buffers before a step: what comes back where the step was refused, and what is copied at all."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from echelon.engine.buffer_snapshot import BufferSnapshot
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


@pytest.mark.parametrize("replacement", [torch.ones(3, 2), torch.ones(1, 1).expand(2, 1)])
def test_a_buffer_of_another_form_comes_back_and_only_then_the_flag_is_read(
    replacement: Tensor,
) -> None:
    model = Counting()
    snapshot = BufferSnapshot([model])
    snapshot.take()
    model.cache = replacement
    with no_reads(), pytest.raises(HasReadError):
        snapshot.restore(flag(True))
    snapshot.restore(flag(False))
    assert model.cache is replacement
    snapshot.restore(flag(True))
    assert torch.equal(model.cache, torch.zeros(2, 1))
    model.cache += 1
    snapshot.restore(True)
    assert torch.equal(model.cache, torch.zeros(2, 1)), "what came back is not the copy itself"


def test_only_what_may_have_changed_is_copied_again() -> None:
    model = Counting()
    snapshot = BufferSnapshot([model])
    snapshot.take()
    model(inputs())
    copied: list[Tensor] = []
    with mock.patch.object(torch, "_foreach_copy_", lambda _, sources: copied.extend(sources)):
        snapshot.take()
    buffers = dict(model.named_buffers())
    assert {name for name, buffer in buffers.items() if any(buffer is each for each in copied)} == {
        "count",
        "average",
        "cache",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
