"""Buckets hold gradients where they are reduced."""

import torch
from torch import nn

from echelon.data_parallel.buckets import Bucket, fill_buckets


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes]


def test_parameters_fill_buckets_in_order_up_to_the_limit() -> None:
    buckets = fill_buckets(parameters(4, 3, 2, 1), limit=5 * 4)
    assert [[p.numel() for p in bucket.views] for bucket in buckets] == [[4], [3, 2], [1]]


def test_a_parameter_above_the_limit_has_a_bucket_alone() -> None:
    buckets = fill_buckets(parameters(1, 100, 1), limit=8)
    assert [bucket.buffer.numel() for bucket in buckets] == [1, 100, 1]


def test_types_do_not_share_a_bucket() -> None:
    mixed = parameters(2, dtype=torch.float64) + parameters(2)
    assert [bucket.buffer.dtype for bucket in fill_buckets(mixed, 1000)] == [torch.float64, torch.float32]


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


def test_a_sparse_gradient_lands_too() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    (bucket,) = fill_buckets([table.weight], 1000)
    table.weight.register_post_accumulate_grad_hook(bucket.accumulate)
    for _ in range(2):
        table(torch.tensor([2, 2])).sum().backward()
    assert bucket.close().tolist() == [0, 0, 0, 0, 4, 4]


def test_what_got_no_gradient_is_zero_and_padding_too() -> None:
    weights = parameters(2, 3)
    bucket = Bucket(weights, size=8)
    bucket.buffer.narrow(0, 0, 5).fill_(7.0)  # of the step before
    bucket.open()
    weights[0].grad = torch.ones(2)
    bucket.accumulate(weights[0])
    assert bucket.close().tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_no_parameters_no_buckets() -> None:
    assert fill_buckets([], 1000) == []
