"""Tensors in one memory: aligned, apart from each other, and laid out as what they stand for."""

import torch

from echelon.update.precision.flat_memory import dense_strides, flat_views, have_same_layout


def test_views_are_aligned_in_one_memory_and_do_not_overlap() -> None:
    like = [torch.empty(3, 5, dtype=torch.bfloat16), torch.empty(64), torch.empty(65), torch.empty(())]
    views = flat_views(like, torch.float32)
    assert [view.shape for view in views] == [tensor.shape for tensor in like]
    assert {view.dtype for view in views} == {torch.float32}
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1
    assert [view.storage_offset() * 4 for view in views] == [0, 256, 512, 1024]
    for number, view in enumerate(views):
        view.fill_(number)
    assert all(bool((view == number).all()) for number, view in enumerate(views))


def test_views_have_the_strides_of_a_copy() -> None:
    channels_last = torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    columns = torch.empty(4, 6)[:, :2]
    views = flat_views([channels_last, columns, torch.empty(3, 2).t()], torch.float32)
    assert [view.stride() for view in views] == [channels_last.stride(), (2, 1), (1, 2)]


def test_nothing_takes_no_memory() -> None:
    assert flat_views([], torch.float32) == []


def test_each_device_has_a_memory_of_its_own() -> None:
    like = [torch.empty(3), torch.empty(4, device="meta"), torch.empty(5)]
    views = flat_views(like, torch.float32)
    assert [view.device.type for view in views] == ["cpu", "meta", "cpu"]
    assert [view.storage_offset() for view in views] == [0, 0, 64]


def test_layouts_are_the_same_where_dims_with_several_elements_have_the_same_strides() -> None:
    plain = torch.empty(2, 3)
    assert have_same_layout(plain, torch.zeros(2, 3))
    assert not have_same_layout(plain, torch.empty(3, 2).t())
    assert have_same_layout(torch.empty(2, 1), torch.empty(2, 1).as_strided((2, 1), (1, 9)))
    assert not have_same_layout(torch.empty(2, 1), torch.empty(8).as_strided((2, 1), (4, 1)))
    assert dense_strides(plain[:, :2]) == (2, 1)
    assert dense_strides(plain.t()) == (1, 3)
    assert dense_strides(plain) == (3, 1)
