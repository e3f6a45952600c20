"""What ranks do over one communicator, in the order of NCCL: it ends, with the right values."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.collectives import Group, naive_all_reduce, ring_all_reduce
from echelon.nn.wrapping import Wrapping
from echelon.parallel.context import put_together, ring_attention, take
from echelon.parallel.data.all_reduce import AllReduce
from echelon.parallel.data.parameter_server import ParameterServer
from echelon.parallel.data.parameter_set import ParameterSet, ShardGroups
from echelon.parallel.data.sharing import Sharing
from echelon.parallel.data.zero.zero import Zero
from tests.nccl_like import NcclWorld
from tests.sets import set_of

Result = TypeVar("Result")

SIZES = [2, 3, 4, 5]


def over_one_group(size: int, fn: Callable[[Group], Result], seed: int | None = None) -> list[Result]:
    world = NcclWorld(size, seed=seed)
    return world.run(lambda rank: fn(world.group("data", range(size), rank)))


# All-reduce written out.


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("all_reduce", [ring_all_reduce, naive_all_reduce])
@pytest.mark.parametrize("length", [1, 7, 20])
def test_all_reduce_over_sends_and_receives(
    all_reduce: Callable[[Group, Tensor], None], size: int, length: int
) -> None:
    def fn(group: Group) -> Tensor:
        tensor = torch.arange(float(length)) + group.rank
        all_reduce(group, tensor)
        return tensor

    expected = size * torch.arange(float(length)) + sum(range(size))
    assert all(torch.equal(result, expected) for result in over_one_group(size, fn))


# Ring attention.


def attended(inputs: list[Tensor], group: Group) -> list[Tensor]:
    """A rank's part of the result and of the gradients."""
    parts = [take(tensor, group.rank, group.size, dim=2).requires_grad_() for tensor in inputs]
    out = ring_attention(parts[0], parts[1], parts[2], group)
    out.square().sum().backward()
    return [out.detach(), *(part.grad for part in parts if part.grad is not None)]


@pytest.mark.parametrize("size", SIZES)
def test_ring_attention(size: int) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 4 * size, 3, dtype=torch.float64) for _ in range(3)]
    parts = over_one_group(size, partial(attended, inputs))
    whole = [tensor.clone().requires_grad_() for tensor in inputs]
    out = F.scaled_dot_product_attention(whole[0], whole[1], whole[2], is_causal=True)
    out.square().sum().backward()
    expected = [out.detach(), *(tensor.grad for tensor in whole)]
    for values, each in zip(expected, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(put_together(each, dim=2), values)


# Data parallelism.

Share = Callable[[ParameterSet], Sharing]
STEPS, MICROBATCHES, RATE = 3, 2, 0.01
SHARINGS: dict[str, Share] = {
    "all-reduce": partial(AllReduce, bucket_bytes=64),
    "parameter-server": partial(ParameterServer, bucket_bytes=64),
    "zero=1": lambda parameter_set: Zero(parameter_set, 1, Wrapping()),
    "zero=2": lambda parameter_set: Zero(parameter_set, 2, Wrapping()),
    "zero=3": lambda parameter_set: Zero(parameter_set, 3, Wrapping()),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def samples(rank: int, step: int, microbatch: int) -> Tensor:
    seed = 100 * rank + 10 * step + microbatch
    return torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def train_replica(share: Share, group: Group, shards: ShardGroups | None = None) -> Tensor:
    """What the model returns after some steps of gradient descent."""
    replica = model()
    sharing = share(set_of(replica, group, shards=shards))
    for step in range(STEPS):
        sharing.start_step()
        for k in range(MICROBATCHES):
            output = replica(samples(group.rank, step, k))
            sharing.start_backward(last=k == MICROBATCHES - 1)
            output.square().sum().backward()
            sharing.finish_backward()
        sharing.reduce()
        for local in sharing.local_parameters():
            assert local.tensor.grad is not None
            local.tensor.data -= RATE * local.tensor.grad
        sharing.publish()
    with torch.no_grad():
        result: Tensor = replica(torch.ones(1, 3, dtype=torch.float64))
    return result


def train_alone(ranks: int) -> Tensor:
    reference = model()
    for step in range(STEPS):
        reference.zero_grad()
        for rank in range(ranks):
            for k in range(MICROBATCHES):
                reference(samples(rank, step, k)).square().sum().backward()
        for parameter in reference.parameters():
            assert parameter.grad is not None
            parameter.data -= RATE * parameter.grad
    with torch.no_grad():
        result: Tensor = reference(torch.ones(1, 3, dtype=torch.float64))
    return result


@pytest.mark.slow_cases(
    "all-reduce-3",
    "all-reduce-4",
    "all-reduce-5",
    "parameter-server-3",
    "parameter-server-4",
    "parameter-server-5",
    "zero=1-3",
    "zero=1-4",
    "zero=1-5",
    "zero=2-3",
    "zero=2-4",
    "zero=2-5",
    "zero=3-3",
    "zero=3-4",
    "zero=3-5",
)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SHARINGS)
def test_replicas_agree(name: str, size: int) -> None:
    expected = train_alone(size)
    for seed in (None, 0):
        for result in over_one_group(size, partial(train_replica, SHARINGS[name]), seed):
            torch.testing.assert_close(result, expected)


@pytest.mark.slow_cases("zero=1-6-2", "zero=1-6-3", "zero=2-6-2", "zero=2-6-3", "zero=3-6-2", "zero=3-6-3")
@pytest.mark.parametrize(("size", "shard"), [(4, 2), (6, 3), (6, 2)])
@pytest.mark.parametrize("name", ["zero=1", "zero=2", "zero=3"])
def test_replicas_agree_in_groups(name: str, size: int, shard: int) -> None:
    """Two communicators beside that of all ranks: gradients of one unit are in both while others follow."""
    expected = train_alone(size)
    for seed in (None, 0, 1):
        world = NcclWorld(size, seed=seed)

        def train(rank: int, world: NcclWorld = world) -> Tensor:
            everyone = world.group("data", range(size), rank)
            begin = rank - rank % shard
            ranks = range(begin, begin + shard)
            parts = world.group("shard", ranks, rank, everyone.ledger)
            copies = world.group("copies", range(rank % shard, size, shard), rank, everyone.ledger)
            return train_replica(SHARINGS[name], everyone, ShardGroups(parts, copies))

        for result in world.run(train):
            torch.testing.assert_close(result, expected)
