"""Parts of a tensor over ranks, without ranks: what each keeps, and whether all have the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.collectives import Ledger, RecordingGroup
from echelon.memory.recompute.checkpoints import ArgumentName, WholeCheckpoints
from echelon.memory.recompute.contiguous import ContiguousCheckpoints, Slots
from echelon.memory.recompute.dense import is_dense, memory_order
from echelon.memory.recompute.split_checkpoints import SplitCheckpoints, _part

ARGUMENT = ArgumentName("layer", 0)


class Alike:
    """Rank 1 of 3, all of which have the same, or of which the last has something else."""

    rank, size = 1, 3

    def __init__(self, *, is_other: bool = False) -> None:
        self.ledger, self._is_other, self.num_calls = Ledger(), is_other, 0

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        self.num_calls += 1
        whole.copy_(part.repeat(3))
        whole[-1] += self._is_other


def split(*, is_other: bool = False) -> tuple[SplitCheckpoints, Alike]:
    group: Any = Alike(is_other=is_other)
    return SplitCheckpoints(group, WholeCheckpoints()), group


@pytest.mark.parametrize(
    ("rank", "elements"), [(0, [0.0, 1.0, 2.0]), (1, [3.0, 4.0, 5.0]), (2, [6.0, 0.0, 0.0])]
)
def test_each_rank_has_a_part_of_equal_size(rank: int, elements: list[float]) -> None:
    assert _part(torch.arange(7.0), RecordingGroup("tensor", rank, 3)).tolist() == elements


def test_what_all_ranks_have_is_split_and_compared_once() -> None:
    checkpoints, group = split()
    tensor = torch.arange(6.0, requires_grad=True)
    assert not checkpoints.keeps_memory(tensor, ARGUMENT)
    assert checkpoints.kept_bytes(tensor, ARGUMENT) == 2 * 4
    assert group.num_calls == 1
    kept = checkpoints.keep(tensor.view(2, 3), None, ARGUMENT)
    assert kept.take().tolist() == [[2.0, 3.0, 2.0], [3.0, 2.0, 3.0]], "this rank's part, from all ranks"
    assert group.num_calls == 2


def test_what_differs_or_has_no_gradient_stays_whole() -> None:
    tensor = torch.arange(6.0, requires_grad=True)
    cases: list[tuple[Tensor, bool, int]] = [
        (tensor, True, 1),
        (tensor.detach(), False, 0),
        (tensor.detach().to_sparse().requires_grad_(), False, 0),
    ]
    for given, is_other, num_calls in cases:
        checkpoints, group = split(is_other=is_other)
        assert checkpoints.keep(given, None, ARGUMENT).take() is not None
        assert checkpoints.keeps_memory(tensor, ARGUMENT) is is_other
        assert group.num_calls == max(num_calls, 1)


def test_equal_elements_are_compared_again() -> None:
    checkpoints, group = split()
    zeros = torch.zeros(6, requires_grad=True)
    assert checkpoints.keeps_memory(zeros, ARGUMENT)
    assert checkpoints.kept_bytes(zeros, ARGUMENT) == 24
    assert group.num_calls == 2
    assert not checkpoints.keeps_memory(torch.arange(6.0, requires_grad=True), ARGUMENT)
    assert not checkpoints.keeps_memory(zeros, ARGUMENT)
    assert group.num_calls == 3


def test_tensors_without_gaps() -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    assert is_dense(base)
    assert is_dense(base.permute(2, 0, 1))
    assert not is_dense(base[:, :2])
    assert not is_dense(base[..., ::2])
    assert memory_order(base.permute(2, 0, 1)).tolist() == list(range(24))


def test_slots_in_one_memory() -> None:
    slots = Slots()
    assert [slots.take(size) for size in (0, 256, 257)] == [0, 256, 512]
    assert slots.size == 1024
    slots.free(256)
    assert (slots.take(257), slots.take(256), slots.size) == (1024, 256, 1536)
    slots.free(0)
    slots.free(256)
    assert slots.take(512) == 0


def test_memory_grows_only_if_more_was_needed() -> None:
    checkpoints = ContiguousCheckpoints(torch.device("cpu"), WholeCheckpoints())
    hidden = torch.arange(100.0, requires_grad=True)
    kept = checkpoints.keep(hidden, None, ARGUMENT)
    assert (len(checkpoints.memory), checkpoints.kept_bytes(hidden, ARGUMENT)) == (0, 400)
    assert torch.equal(kept.take(), hidden)
    checkpoints.after_passes()
    memory = checkpoints.memory
    assert len(memory) == 512
    kept = checkpoints.keep(hidden, None, ARGUMENT)
    assert kept.take().data_ptr() == memory.data_ptr()
    checkpoints.after_passes()
    assert checkpoints.memory is memory
    for other in (
        hidden.detach(),
        torch.zeros(0, requires_grad=True),
        torch.ones(4, 4, requires_grad=True)[:, :2],
    ):
        assert checkpoints.keeps_memory(other, ARGUMENT)
