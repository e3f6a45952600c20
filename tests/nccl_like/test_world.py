"""The group behaves like NCCL: what completes, what blocks, and what a deadlock's report says."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from echelon.launching import PeerLost
from tests.nccl_like import Deadlock, Mismatch, NcclLikeGroup, NcclWorld

SEEDS = [None, *range(10)]


def ones(count: int = 1) -> Tensor:
    return torch.ones(count)


def over_one_group(size: int, fn: Callable[[NcclLikeGroup], Tensor]) -> list[list[float]]:
    """What `fn` returns on each rank of a group."""
    world = NcclWorld(size)
    results = world.run(lambda rank: fn(world.group("data", range(size), rank)))
    return [result.tolist() for result in results]


# Sends and receives.


def head_to_head(world: NcclWorld, rank: int) -> None:
    group = world.group("data", range(2), rank)
    sending = group.send(ones(), 1 - rank, wait=False)
    group.recv(ones(2), 1 - rank)
    sending.wait()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_send_waits_for_its_receive_and_the_report_names_both_queues(seed: int | None) -> None:
    world = NcclWorld(2, seed=seed)
    with pytest.raises(Deadlock) as deadlock:
        world.run(lambda rank: head_to_head(world, rank))
    assert str(deadlock.value).splitlines() == [
        "every rank waits, and no operation can complete",
        "rank 0 waits for recv from 1 (2 float32) on data[0] of ranks 0-1",
        "    queue on data[0] of ranks 0-1: send to 1 (1 float32), recv from 1 (2 float32)",
        "rank 1 waits for recv from 0 (2 float32) on data[0] of ranks 0-1",
        "    queue on data[0] of ranks 0-1: send to 0 (1 float32), recv from 0 (2 float32)",
    ]


def chain(world: NcclWorld, rank: int, communicators: int) -> Tensor:
    """Rank 1 is ready to receive from rank 0 before it sends to rank 2, and rank 0 waits for rank 2."""
    groups = [world.group("data", range(3), rank) for _ in range(communicators)]
    first, second, third = groups[0], groups[-1], groups[len(groups) // 2]
    received = torch.zeros(1)
    if rank == 1:
        receiving = first.recv(received, 0, wait=False)
        second.send(ones(), 2)
        receiving.wait()
    elif rank == 2:
        second.recv(received, 1)
        third.send(received + 1, 0)
    else:
        third.recv(received, 2)
        first.send(received + 1, 1)
    return received


@pytest.mark.parametrize("seed", SEEDS)
def test_one_communicator_has_one_queue_over_all_peers(seed: int | None) -> None:
    world = NcclWorld(3, seed=seed)
    with pytest.raises(Deadlock, match=r"rank 1 .*\n    queue .*: recv from 0 .*, send to 2"):
        world.run(lambda rank: chain(world, rank, communicators=1))
    world = NcclWorld(3, seed=seed)
    results = world.run(lambda rank: chain(world, rank, communicators=3))
    assert [result.item() for result in results] == [2, 3, 1]


def test_communicators_that_share_a_stream_have_one_queue() -> None:
    world = NcclWorld(3, streams=1)
    with pytest.raises(Deadlock, match=r"rank 1 .*\n    queue .*: recv from 0 .*\n    queue .*: send to 2"):
        world.run(lambda rank: chain(world, rank, communicators=3))
    world = NcclWorld(3, streams=3)
    results = world.run(lambda rank: chain(world, rank, communicators=3))
    assert [result.item() for result in results] == [2, 3, 1]


def test_a_rank_that_has_ended_is_named() -> None:
    world = NcclWorld(2)

    def fn(rank: int) -> None:
        group = world.group("data", range(2), rank)
        if rank == 0:
            group.recv(ones(), 1)

    with pytest.raises(Deadlock, match="rank 1 has ended"):
        world.run(fn)


def overwritten(world: NcclWorld, rank: int, *, wait: bool) -> float:
    """Rank 0 sends, and writes to the memory before it is received."""
    group, other = (world.group("data", range(2), rank) for _ in range(2))
    tensor = torch.zeros(1)
    if rank == 0:
        sending = group.send(tensor, 1, wait=False)
        if wait:
            sending.wait()
        tensor.fill_(7)
    other.barrier()
    if rank == 1:
        group.recv(tensor, 0)
    return tensor.item()


def test_a_message_is_read_when_it_is_received() -> None:
    world = NcclWorld(2)
    assert world.run(lambda rank: overwritten(world, rank, wait=False)) == [7, 7]


def test_a_wait_for_a_send_may_return_at_once() -> None:
    world = NcclWorld(2)
    with pytest.raises(Deadlock, match="rank 0 waits for send to 1"):
        world.run(lambda rank: overwritten(world, rank, wait=True))
    world = NcclWorld(2, waits_for_sends=False)
    assert world.run(lambda rank: overwritten(world, rank, wait=True)) == [7, 0]


# Making communicators.


def test_ranks_that_make_communicators_in_different_orders_deadlock() -> None:
    world = NcclWorld(2)

    def fn(rank: int) -> None:
        for axis in ("data", "tensor") if rank == 0 else ("tensor", "data"):
            world.group(axis, range(2), rank)

    with pytest.raises(
        Deadlock, match=r"rank 0 waits for the making of data\[0\] of ranks 0-1, to which \[1\]"
    ):
        world.run(fn)


def test_a_lazy_communicator_is_made_by_the_first_operation_of_each() -> None:
    """As a pipeline of two ranks: a receive of the gradient is posted before the activation is sent."""

    def fn(world: NcclWorld, rank: int) -> None:
        up, down = (world.group("pipeline", range(2), rank) for _ in range(2))
        if rank == 0:
            receiving = down.recv(ones(), 1, wait=False)
            up.send(ones(), 1)
            receiving.wait()
        else:
            up.recv(ones(), 0)
            down.send(ones(), 0)

    world = NcclWorld(2)
    world.run(lambda rank: fn(world, rank))
    world = NcclWorld(2, lazy=True)
    with pytest.raises(Deadlock, match=r"rank 0 waits for the making of pipeline\[1\]"):
        world.run(lambda rank: fn(world, rank))


# What does not match.


def test_sizes_and_types_must_match() -> None:
    for other in (torch.zeros(3), torch.zeros(2, dtype=torch.int32)):
        world = NcclWorld(2)

        def fn(rank: int, world: NcclWorld = world, other: Tensor = other) -> None:
            group = world.group("data", range(2), rank)
            if rank == 0:
                group.send(ones(2), 1)
            else:
                group.recv(other, 0)

        with pytest.raises(Mismatch, match=r"send to 1 \(2 float32\)"):
            world.run(fn)


def test_collectives_must_match() -> None:
    def fn(group: NcclLikeGroup) -> Tensor:
        tensor = ones()
        if group.rank == 2:
            group.broadcast(tensor)
        else:
            group.all_reduce(tensor)
        return tensor

    with pytest.raises(Mismatch, match=r"all_reduce \(sum 1 float32\)"):
        over_one_group(3, fn)


def test_an_error_of_one_rank_ends_the_others() -> None:
    world = NcclWorld(3)
    ended = []

    def fn(rank: int) -> None:
        group = world.group("data", range(3), rank)
        if rank == 1:
            raise ValueError("of rank 1")
        try:
            group.barrier()
        except PeerLost:
            ended.append(rank)
            raise

    with pytest.raises(ValueError, match="of rank 1"):
        world.run(fn)
    assert sorted(ended) == [0, 2]


# Collectives.


def numbers(group: NcclLikeGroup) -> Tensor:
    """[1, 2, 3], [4, 5, 6], …: three ranks have the numbers from 1 to 9."""
    return torch.arange(1.0, 4.0) + 3 * group.rank


def test_all_reduce_and_reduce() -> None:
    def reduced(op: str, target: int | None = None) -> list[list[float]]:
        def fn(group: NcclLikeGroup) -> Tensor:
            tensor = numbers(group)
            group.all_reduce(tensor, op) if target is None else group.reduce(tensor, target, op)  # type: ignore[arg-type]
            return tensor

        return over_one_group(3, fn)

    assert reduced("sum") == [[12, 15, 18]] * 3
    assert reduced("mean") == [[4, 5, 6]] * 3
    assert reduced("max") == [[7, 8, 9]] * 3
    assert reduced("min", target=1)[1] == [1, 2, 3]


def test_parts_of_wholes() -> None:
    def reduce_scatter(group: NcclLikeGroup) -> Tensor:
        part = torch.zeros(1)
        group.reduce_scatter(part, numbers(group))
        return part

    def all_gather(group: NcclLikeGroup) -> Tensor:
        whole = torch.zeros(9)
        group.all_gather(whole, numbers(group))
        return whole

    def scatter(group: NcclLikeGroup) -> Tensor:
        part = torch.zeros(1)
        group.scatter(part, numbers(group) if group.rank == 2 else None, source=2)
        return part

    def gather(group: NcclLikeGroup) -> Tensor:
        whole = torch.zeros(9) if group.rank == 1 else None
        group.gather(numbers(group), whole, target=1)
        return torch.zeros(0) if whole is None else whole

    def broadcast(group: NcclLikeGroup) -> Tensor:
        tensor = numbers(group)
        group.broadcast(tensor, source=1)
        return tensor

    everything = [float(number) for number in range(1, 10)]
    assert over_one_group(3, reduce_scatter) == [[12], [15], [18]]
    assert over_one_group(3, all_gather) == [everything] * 3
    assert over_one_group(3, scatter) == [[7], [8], [9]]
    assert over_one_group(3, gather) == [[], everything, []]
    assert over_one_group(3, broadcast) == [[4, 5, 6]] * 3


def test_all_to_all_with_rows_of_any_number() -> None:
    def fn(group: NcclLikeGroup) -> Tensor:
        """Rank r sends r+1 rows of 10·r + q to rank q."""
        rows = [group.rank + 1] * 2
        given = torch.cat([torch.full((group.rank + 1, 1), 10.0 * group.rank + q) for q in range(2)])
        output = torch.zeros(3, 1)
        group.all_to_all(output, given, [1, 2], rows)
        return output.view(-1)

    assert over_one_group(2, fn) == [[0, 10, 10], [1, 11, 11]]
