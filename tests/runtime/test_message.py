"""A message in one piece of memory comes out as it went in."""

import torch
from torch import Tensor

from echelon.runtime import message
from echelon.runtime.structure import Leaf, Spec


def memory_for(leaves: list[Leaf]) -> Tensor:
    """With something of an earlier message in it."""
    return torch.full((message.size(leaves),), 0xAB, dtype=torch.uint8)


TENSORS = [
    torch.arange(3, dtype=torch.uint8),  # the next one begins at a multiple of 16 still
    torch.arange(6.0).view(2, 3).t(),
    torch.tensor(1.5, dtype=torch.bfloat16),
    torch.zeros(0, 4),
    torch.complex(torch.ones(2), torch.arange(2.0)).conj(),
    torch.tensor([True, False]),
]


def test_tensors_of_any_type_and_layout_come_out_as_they_went_in() -> None:
    leaves = list(Spec.of(TENSORS)[0].leaves)
    memory = memory_for(leaves)
    message.write(memory, leaves, TENSORS)
    assert message.code(memory) == 0
    for received, sent in zip(message.tensors_of(memory, leaves), TENSORS, strict=True):
        assert received.dtype == sent.dtype
        assert torch.equal(received, sent)


def test_gradients_that_are_none_stay_none_and_the_loss_comes_along() -> None:
    leaves = [Leaf((2,), torch.float32, wants_gradient=True)] * 3
    memory = memory_for(leaves)
    message.write(memory, leaves, [torch.ones(2), None, torch.zeros(2)], tally=(3.25, 7.0))
    tensors, tally = message.gradients_of(memory, leaves)
    assert [None if tensor is None else tensor.tolist() for tensor in tensors] == [[1, 1], None, [0, 0]]
    assert tally == (3.25, 7.0)


def test_an_announcement_has_the_length_of_what_follows() -> None:
    memory = memory_for([])
    message.announce(memory, 12345)
    assert message.code(memory) == 12345


def test_tensors_do_not_overlap_and_are_aligned() -> None:
    leaves = [Leaf((count,), torch.uint8, wants_gradient=False) for count in (1, 15, 16, 17)]
    memory = memory_for(leaves)
    starts = [each.data_ptr() - memory.data_ptr() for each in message.tensors_of(memory, leaves)]
    assert starts == [32, 48, 64, 80]
    assert message.size(leaves) == 112
