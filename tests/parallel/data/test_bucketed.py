"""Gradients in buckets: how many there are, when each is complete, and what a step leaves."""

import pytest
import torch
from torch import nn

from echelon.parallel.data.all_reduce import AllReduce
from echelon.parallel.data.parameter_server import ParameterServer
from tests.groups import DeferredGroup
from tests.sets import set_of

pytestmark = pytest.mark.usefixtures("packed")


def model_of(*sizes: int) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.ones(size)) for size in sizes])


def bucket_sizes(sharing: AllReduce) -> list[list[int]]:
    return [[parameter.numel() for parameter in bucket.views] for bucket in sharing._buckets]


def step(sharing: AllReduce, model: nn.ParameterList, *numbers: int) -> None:
    """One step in which the gradients of these parameters come, in this order; each is 1."""
    sharing.start_step()
    sharing.start_backward(last=True)
    for number in numbers:
        model[number].sum().backward()
    sharing.finish_backward()
    sharing.reduce()


def test_a_small_model_has_a_bucket_and_a_large_one_at_least_four() -> None:
    assert len(bucket_sizes(AllReduce(set_of(model_of(10, 20, 30), DeferredGroup())))) == 1
    large = model_of(*[150_000] * 8)  # 4.8 MB
    assert bucket_sizes(AllReduce(set_of(large, DeferredGroup()))) == [[150_000] * 2] * 4
    assert bucket_sizes(AllReduce(set_of(large, DeferredGroup()), bucket_bytes=100)) == [[150_000]] * 8


def test_buckets_are_filled_in_reverse_and_after_the_first_step_in_the_order_of_arrival() -> None:
    model, group = model_of(1, 2, 3), DeferredGroup()
    sharing = AllReduce(set_of(model, group), bucket_bytes=4)
    assert bucket_sizes(sharing) == [[3], [2], [1]]
    step(sharing, model, 1, 0, 2)
    sharing.publish()
    assert bucket_sizes(sharing) == [[2], [1], [3]]
    step(sharing, model, 2, 1, 0)
    sharing.publish()
    assert bucket_sizes(sharing) == [[2], [1], [3]], "it is agreed on once"
    assert group.subjects.count("order") == 1


def test_gradients_are_the_sums_over_ranks_when_reduce_returns() -> None:
    model, group = model_of(1, 2), DeferredGroup(size=3)
    sharing = AllReduce(set_of(model, group), bucket_bytes=4)
    step(sharing, model, 0, 1)
    assert group.pending == []
    assert [parameter.grad.tolist() for parameter in model] == [[3.0], [3.0, 3.0]]


def test_what_no_rank_used_has_no_gradient() -> None:
    """As on one device: the optimizer leaves it alone."""
    model, group = model_of(1, 2), DeferredGroup()
    sharing = AllReduce(set_of(model, group))
    step(sharing, model, 1)
    assert model[0].grad is None
    assert model[1].grad.tolist() == [2.0, 2.0]
    step(sharing, model, 0)
    assert model[0].grad.tolist() == [2.0], "used is said of one step"
    assert model[1].grad is None


def test_a_replica_without_samples_reduces_zeros() -> None:
    model, group = model_of(1, 2), DeferredGroup()
    sharing = AllReduce(set_of(model, group), bucket_bytes=4)
    sharing.start_step()
    sharing.reduce()
    assert group.subjects == ["gradients", "gradients", "used parameters"]
    assert group.pending == []
    assert [tensor.tolist() for tensor in sharing.storages().gradients] == [[0.0, 0.0], [0.0]]


def test_a_step_that_failed_leaves_nothing_on_the_way() -> None:
    model, group = model_of(1, 2), DeferredGroup()
    sharing = AllReduce(set_of(model, group), bucket_bytes=4)
    sharing.start_step()
    sharing.start_backward(last=True)
    model[1].sum().backward()
    assert len(group.pending) == 1
    sharing.start_step()
    assert group.pending == []
    assert [parameter.grad for parameter in model] == [None, None]
    step(sharing, model, 0, 1)
    assert [parameter.grad.tolist() for parameter in model] == [[2.0], [2.0, 2.0]]


def test_a_closed_strategy_listens_to_no_gradients() -> None:
    model, group = model_of(1, 2), DeferredGroup()
    sharing = AllReduce(set_of(model, group))
    sharing.close()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model)


@pytest.mark.parametrize(
    ("total", "bucket"),
    [(2**10, 2**20), (2**22, 2**20), (2**23, 2**21), (100 * 2**20, 25 * 2**20), (2**30, 25 * 2**20)],
)
def test_there_are_four_buckets_of_at_most_25_mib_and_at_least_1(total: int, bucket: int) -> None:
    model = nn.ParameterList([nn.Parameter(torch.empty(total // 4, device="meta"))])
    for kind in (AllReduce, ParameterServer):
        sharing = kind(set_of(model, DeferredGroup()))
        assert sharing._bucket_bytes == bucket
        sharing.close()
