"""Tensors in one memory: aligned, apart from each other, and laid out as what they stand for."""

import pytest
import torch
from torch import Tensor, nn

from echelon.update.precision import flat_memory
from echelon.update.precision.flat_memory import (
    as_float32,
    dense_strides,
    divide,
    flat_views,
    have_same_layout,
    views_like,
)


@pytest.fixture(autouse=True)
def _divides_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_memory, "_SMALLEST_PORTION", 0)


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


BF16, FP32 = torch.bfloat16, torch.float32


def weight(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=BF16))
    parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient
    return parameter


def portions(*gradients: Tensor) -> list[list[int]]:
    """How many elements the weights of each portion have."""
    weights = [weight(gradient) for gradient in gradients]
    masters = [nn.Parameter(torch.zeros(each.shape)) for each in weights]
    return [[each.numel() for each in portion] for portion in divide(weights, masters)]


def low(*sizes: int) -> list[Tensor]:
    return [torch.ones(size, dtype=BF16) for size in sizes]


def test_at_most_half_is_copied_at_a_time() -> None:
    assert portions(*low(64, 64, 64, 64)) == [[64, 64], [64, 64]]
    assert portions(*low(64, 640, 64, 512)) == [[64], [640], [64, 512]], "what is more than half goes alone"
    assert portions(*low(1, 2, 64, 63)) == [[1, 2], [64, 63]], "a copy takes blocks of 64 elements"


def test_small_copies_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_memory, "_SMALLEST_PORTION", 4 * 64 * 4)
    assert portions(*low(64, 64, 64, 64)) == [[64, 64, 64, 64]]
    assert portions(*low(64, 64, 64, 64, 64)) == [[64, 64, 64, 64], [64]]
    assert portions(*low(256, 256, 256, 256)) == [[256, 256], [256, 256]]


def test_a_portion_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_memory, "_LARGEST_PORTION", 2 * 64 * 4)
    assert portions(*low(64, 64, 64, 64, 64, 128, 64)) == [[64, 64], [64, 64], [64], [128], [64]]


def test_what_is_not_copied_belongs_to_any_portion() -> None:
    wide = [torch.ones(640), torch.ones(64)]
    assert portions(*wide) == [[640, 64]]
    assert portions(wide[0], *low(64), wide[1], *low(64), wide[0]) == [[640, 64, 64], [64, 640]]
    assert portions() == []


def test_float32_gradients_are_taken_as_they_are() -> None:
    gradient = torch.ones(3)
    (taken,) = as_float32([weight(gradient)], [nn.Parameter(torch.zeros(3))])
    assert taken is gradient


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (1, 1), (3, 1, 2)])
def test_the_stride_of_a_dim_of_size_1_is_no_reason_to_copy(shape: tuple[int, ...]) -> None:
    """It was: the gradient of a matrix with one column, which a product made as one with one row."""
    plain = torch.ones(shape)
    strides = [99 if size == 1 else stride for size, stride in zip(shape, plain.stride(), strict=True)]
    gradient = plain.as_strided(shape, strides)
    assert gradient.stride() != plain.stride()
    (taken,) = as_float32([weight(gradient)], [nn.Parameter(torch.zeros(shape))])
    assert taken is gradient


def test_other_types_and_layouts_are_copied_into_one_memory() -> None:
    gradients = [torch.arange(6.0).view(3, 2).t(), torch.ones(3, dtype=BF16), torch.ones(2)]
    masters = [nn.Parameter(torch.zeros(gradient.shape)) for gradient in gradients]
    copies = as_float32([weight(gradient) for gradient in gradients], masters)
    assert all(torch.equal(copy, gradient.float()) for copy, gradient in zip(copies, gradients, strict=True))
    assert [copy.stride() for copy in copies] == [master.stride() for master in masters]
    assert copies[0].untyped_storage()._cdata == copies[1].untyped_storage()._cdata
    assert copies[2] is gradients[2]


def test_a_gradient_without_elements_is_converted_too() -> None:
    parameter = weight(torch.ones(0, 3, dtype=BF16))
    (converted,) = as_float32([parameter], [nn.Parameter(torch.zeros(0, 3))])
    assert (converted.dtype, converted.shape) == (FP32, (0, 3))


def test_a_sparse_gradient_stays_sparse() -> None:
    table = nn.Embedding(4, 2, sparse=True, dtype=BF16)
    table(torch.tensor([1, 1, 3])).sum().backward()
    (gradient,) = as_float32([table.weight], [nn.Parameter(torch.zeros(4, 2))])
    assert (gradient.is_sparse, gradient.dtype) == (True, FP32)
    assert gradient.to_dense()[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0]


def test_views_lie_in_memory_that_begins_inside_of_its_storage() -> None:
    """Memory for copies is pinned from a page on: what lies before it is copied as any other memory."""
    taken: list[Tensor] = []

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        taken.append(torch.zeros(size + 50, dtype=dtype)[40 : 40 + size])
        return taken[0]

    memory, views = views_like([torch.ones(3, 2), torch.ones(5, 4).t()], torch.float32, empty)
    assert memory is taken[0]
    for view in views:
        view.fill_(1)
    assert views[0].data_ptr() == memory.data_ptr()
    assert float(memory.sum()) == 26, "no element lies outside"
