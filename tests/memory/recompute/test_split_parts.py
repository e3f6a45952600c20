"""Parts of a tensor over ranks, without ranks: what each keeps, and whether all have the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.collectives import Ledger, RecordingGroup
from echelon.memory.recompute.saved_inputs import (
    ArgumentName,
    ContiguousInputs,
    SavedInputs,
    Slots,
    SplitInputs,
    _part,
)

ARGUMENT = ArgumentName("layer", 0)


class Alike:
    """Rank 1 of 3, all of which have the same, or of which the last has something else."""

    rank, size = 1, 3

    def __init__(self, *, is_other: bool = False) -> None:
        self.ledger, self._is_other, self.num_calls = Ledger(), is_other, 0

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        self.num_calls += 1
        whole.view(-1).copy_(part.repeat(3))
        whole.view(-1)[-1] += self._is_other


def split(*, is_other: bool = False) -> tuple[SplitInputs, Alike]:
    group: Any = Alike(is_other=is_other)
    return SplitInputs(group, SavedInputs()), group


@pytest.mark.parametrize(
    ("rank", "elements"), [(0, [0.0, 1.0, 2.0]), (1, [3.0, 4.0, 5.0]), (2, [6.0, 0.0, 0.0])]
)
def test_each_rank_has_a_part_of_equal_size(rank: int, elements: list[float]) -> None:
    assert _part(torch.arange(7.0), RecordingGroup("tensor", rank, 3)).tolist() == elements


def test_what_all_ranks_have_is_split_and_compared_once() -> None:
    inputs, group = split()
    tensor = torch.arange(6.0, requires_grad=True)
    assert not inputs.keeps_memory(tensor, ARGUMENT)
    assert inputs.kept_bytes(tensor, ARGUMENT) == 2 * 4
    assert group.num_calls == 1
    kept = inputs.keep(tensor.view(2, 3), None, ARGUMENT)
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
        inputs, group = split(is_other=is_other)
        assert inputs.keep(given, None, ARGUMENT).take() is not None
        assert inputs.keeps_memory(tensor, ARGUMENT) is is_other
        assert group.num_calls == max(num_calls, 1)


def test_equal_elements_are_compared_again() -> None:
    inputs, group = split()
    zeros = torch.zeros(6, requires_grad=True)
    assert inputs.keeps_memory(zeros, ARGUMENT)
    assert inputs.kept_bytes(zeros, ARGUMENT) == 24
    assert group.num_calls == 2
    assert not inputs.keeps_memory(torch.arange(6.0, requires_grad=True), ARGUMENT)
    assert not inputs.keeps_memory(zeros, ARGUMENT)
    assert group.num_calls == 3


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
    inputs = ContiguousInputs(torch.device("cpu"), SavedInputs())
    hidden = torch.arange(100.0, requires_grad=True)
    kept = inputs.keep(hidden, None, ARGUMENT)
    assert (len(inputs.memory), inputs.kept_bytes(hidden, ARGUMENT)) == (0, 400)
    assert torch.equal(kept.take(), hidden)
    inputs.after_passes()
    memory = inputs.memory
    assert len(memory) == 512
    kept = inputs.keep(hidden, None, ARGUMENT)
    assert kept.take().data_ptr() == memory.data_ptr()
    inputs.after_passes()
    assert inputs.memory is memory
    for other in (
        hidden.detach(),
        torch.zeros(0, requires_grad=True),
        torch.ones(4, 4, requires_grad=True)[:, :2],
    ):
        assert inputs.keeps_memory(other, ARGUMENT)
