"""Buckets hold gradients where they are reduced."""

import math

import pytest
import torch
from torch import nn

from echelon.collectives.buffer_layout import BufferLayout
from echelon.parallel.data.buckets import Bucket, fill_buckets, move_in, point_at
from echelon.parallel.data.grad_dtype import set_gradient_dtype, weight_dtype


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes]


def test_parameters_fill_buckets_in_order_up_to_the_limit() -> None:
    buckets = fill_buckets(parameters(4, 3, 2, 1), limit=5 * 4)
    assert [[p.numel() for p in bucket.views] for bucket in buckets] == [[4], [3, 2], [1]]


def test_a_parameter_above_the_limit_has_a_bucket_alone() -> None:
    buckets = fill_buckets(parameters(1, 100, 1), limit=8)
    assert [[p.numel() for p in bucket.views] for bucket in buckets] == [[1], [100], [1]]


def test_types_do_not_share_a_bucket() -> None:
    mixed = parameters(2, dtype=torch.float64) + parameters(2)
    assert [bucket.buffer.dtype for bucket in fill_buckets(mixed, 1000)] == [torch.float64, torch.float32]


def test_gradients_of_low_precision_fill_buckets_of_float32() -> None:
    low, high = parameters(3, 3, dtype=torch.bfloat16), parameters(3)
    for parameter in low:
        set_gradient_dtype(parameter, in_float32=True)
    assert [bucket.buffer.dtype for bucket in fill_buckets([*low, *high], 1000)] == [torch.float32]
    assert len(fill_buckets(low, limit=4 * 5)) == 2, "which are filled by the bytes of gradients"
    (weights,) = fill_buckets(low, 1000, weight_dtype)
    assert weights.buffer.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_view_begins_at_a_multiple_of_256_bytes(dtype: torch.dtype) -> None:
    (bucket,) = fill_buckets(parameters(3, 200, 128, 1, dtype=dtype), 100_000)
    starts = [view.storage_offset() * dtype.itemsize for view in bucket.views.values()]
    assert starts[0] == 0
    assert all(start % 256 == 0 for start in starts)
    bucket.reallocate()
    assert [view.storage_offset() * dtype.itemsize for view in bucket.views.values()] == starts


@pytest.mark.usefixtures("packed")
def test_gradients_land_in_the_buffer_and_add_up_there() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    (bucket,) = fill_buckets([weight], 1000)
    weight.register_post_accumulate_grad_hook(bucket.accumulate)
    for _ in range(2):  # steps
        bucket.open()
        for _ in range(2):
            (weight * torch.arange(6.0).view(2, 3)).sum().backward()
        assert torch.equal(bucket.close(), 2 * torch.arange(6.0))
        assert weight.grad is not None
        assert weight.grad.data_ptr() == bucket.buffer.data_ptr()


@pytest.mark.usefixtures("packed")
def test_a_sparse_gradient_lands_too() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    (bucket,) = fill_buckets([table.weight], 1000)
    table.weight.register_post_accumulate_grad_hook(bucket.accumulate)
    for _ in range(2):
        table(torch.tensor([2, 2])).sum().backward()
    assert bucket.close().tolist() == [0, 0, 0, 0, 4, 4]


def test_what_got_no_gradient_is_zero_and_gaps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that somebody had before holds anything."""
    monkeypatch.setattr(torch, "empty", lambda size, **options: torch.full((size,), math.nan, **options))
    weights = parameters(2, 3)
    bucket = Bucket(weights, torch.float32, BufferLayout([(0, 2), (4, 7)], 8))
    for view in bucket.views.values():
        view.fill_(7.0)  # of the step before
    bucket.open()
    weights[0].grad = torch.ones(2)
    bucket.accumulate(weights[0])
    assert bucket.close().tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_no_parameters_no_buckets() -> None:
    assert fill_buckets([], 1000) == []


def test_a_bucket_that_moves_leaves_the_old_memory_to_its_holders() -> None:
    weights = parameters(2, 3)
    bucket = Bucket(weights, torch.float32)
    with torch.no_grad():
        for number, weight in enumerate(weights):
            weight.fill_(number + 1)
    move_in(bucket)
    old = [weight.data for weight in weights]
    bucket.reallocate()
    point_at(bucket)
    with torch.no_grad():
        bucket.buffer.add_(10)
    assert [weight.tolist() for weight in weights] == [[11.0, 11.0], [12.0, 12.0, 12.0]]
    assert [values.tolist() for values in old] == [[1.0, 1.0], [2.0, 2.0, 2.0]]
