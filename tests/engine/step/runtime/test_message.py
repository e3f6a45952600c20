"""A message in one piece of memory comes out as it went in."""

import sys

import pytest
import torch
from torch import Tensor

from echelon.engine.step.runtime import message
from echelon.engine.step.runtime.message import Layout, Leaf, Spec

TENSORS = [
    torch.arange(3, dtype=torch.uint8),  # the next one begins at a multiple of 16 still
    torch.arange(6.0).view(2, 3).t(),
    torch.tensor(1.5, dtype=torch.bfloat16),
    torch.zeros(0, 4),
    torch.complex(torch.ones(2), torch.arange(2.0)).conj(),
    torch.tensor([True, False]),
]


def memory_for(layout: Layout) -> Tensor:
    """With something of an earlier message in it."""
    return torch.full((layout.size,), 0xAB, dtype=torch.uint8)


@pytest.mark.parametrize("head_inside", [True, False])
def test_tensors_of_any_type_and_layout_come_out_as_they_went_in(head_inside: bool) -> None:
    layout = message.layout(Spec.of(TENSORS)[0].leaves, head_inside=head_inside)
    memory = memory_for(layout)
    layout.write(memory, TENSORS)
    if head_inside:
        message.write_bytes(memory, message.pack_code(0) + message.pack_flags(TENSORS))
    for received, sent in zip(layout.tensors(memory), TENSORS, strict=True):
        assert received.dtype == sent.dtype
        assert torch.equal(received, sent)


def test_a_head_has_the_length_of_what_follows_and_a_flag_for_each_tensor() -> None:
    tensors = [torch.ones(2), None, torch.zeros(2)]
    head = message.pack_code(12345) + message.pack_flags(tensors)
    layout = message.layout((Leaf((2,), torch.float32, wants_gradient=True),) * 3, head_inside=True)
    memory = memory_for(layout)
    message.write_bytes(memory, head)
    read = message.read_bytes(memory, layout.head_size)
    assert message.code_of(read) == 12345
    assert [bool(flag) for flag in message.flags_of(read)] == [True, False, True]
    assert message.read_bytes(message.host_bytes(head), len(head)) == head


@pytest.mark.parametrize(("head_inside", "first"), [(True, 16), (False, 0)])
def test_tensors_do_not_overlap_and_are_aligned(head_inside: bool, first: int) -> None:
    leaves = tuple(Leaf((count,), torch.uint8, wants_gradient=False) for count in (1, 15, 16, 17))
    layout = message.layout(leaves, head_inside=head_inside)
    memory = memory_for(layout)
    starts = [each.data_ptr() - memory.data_ptr() for each in layout.tensors(memory)]
    assert starts == [first, first + 16, first + 32, first + 48]
    assert layout.size == first + 80


def test_a_head_of_many_flags_takes_room_before_the_tensors() -> None:
    leaves = (Leaf((1,), torch.complex128, wants_gradient=False),)
    for count in range(40):
        layout = message.layout(leaves * count, head_inside=True)
        assert layout.size % 16 == 0
        assert layout.size - 16 * count >= layout.head_size


def test_where_tensors_lie_by_hand() -> None:
    leaves = (
        Leaf((3,), torch.float32, wants_gradient=True),
        Leaf((2, 2), torch.float64, wants_gradient=False),
    )
    layout = message.layout(leaves, head_inside=True)
    assert (layout.places, layout.size, layout.head_size) == ([slice(16, 28), slice(32, 64)], 64, 10)
    assert message.layout(leaves, head_inside=False).places == [slice(0, 12), slice(16, 48)]
    assert (leaves[0].num_bytes, leaves[0].room, leaves[1].room) == (12, 16, 32)
    assert message.pack_code(258) == (258).to_bytes(8, sys.byteorder)
    assert (message.TALLY.shape, message.TALLY.dtype, message.TALLY.wants_gradient) == (
        (3,),
        torch.float64,
        False,
    )
    assert message.Gradients([]).tally is None


def test_a_tensor_that_is_missing_leaves_its_place_as_it_was() -> None:
    layout = message.layout((Leaf((2,), torch.uint8, wants_gradient=True),) * 2, head_inside=False)
    memory = memory_for(layout)
    layout.write(memory, [None, torch.tensor([1, 2], dtype=torch.uint8)])
    assert [each.tolist() for each in layout.tensors(memory)] == [[0xAB, 0xAB], [1, 2]]


def test_values_are_converted_to_what_was_announced() -> None:
    """A gradient may come in another type than its activation has."""
    layout = message.layout((Leaf((2,), torch.float32, wants_gradient=True),), head_inside=False)
    for sent in (torch.tensor([1.0, -2.0]).double(), torch.tensor([1.0, -2.0, 9.0])[:2], _negative()):
        memory = memory_for(layout)
        layout.write(memory, [sent])
        assert layout.tensors(memory)[0].tolist() == [1.0, -2.0]


def _negative() -> Tensor:
    """Whose memory holds other signs."""
    return torch._neg_view(torch.tensor([-1.0, 2.0]))
