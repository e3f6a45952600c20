"""The ledger on a GPU: real NCCL between two ranks that share one device, each as a host of its own."""

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from echelon.collectives import Ledger, TorchGroup, group_over
from echelon.errors import UserError
from echelon.launching import Ranks
from tests.gpu.nccl import environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ALLOWED = 2e-3  # seconds by which the axes of host and device may differ


@pytest.fixture(scope="module")
def nccl() -> Iterator[Ranks]:
    with Ranks(2, backend="nccl", deadline=120.0, environment=environment) as ranks:
        yield ranks


def this_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def world() -> TorchGroup:
    assert dist.group.WORLD is not None
    group = TorchGroup("data", dist.group.WORLD, Ledger())
    group.connect(this_device())
    group.all_reduce(torch.ones(1 << 20, device=this_device()))
    torch.cuda.synchronize()
    group.ledger.start_step()
    return group


def overlapped() -> None:
    group = world()
    buffer = torch.ones(1 << 20, device=this_device())
    torch.cuda.synchronize()
    started = time.perf_counter()
    torch.cuda.set_sync_debug_mode("error")
    try:
        handle = group.all_reduce(buffer, wait=False)
        torch.cuda._sleep(2_000_000_000)  # about a second
        handle.wait()
        issued = time.perf_counter()
        group.all_reduce(buffer)
        group.ledger.start_step()
        group.all_reduce(buffer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    total = group.ledger.total("data")
    ended = time.perf_counter()
    assert issued - started < ended - issued, "the host did not wait"
    (last,) = group.ledger.moves
    assert total.count == 4
    assert last.waited == last.seconds > 0
    assert started <= last.start
    assert last.start + last.seconds <= ended + ALLOWED


def test_times_come_from_the_device_and_the_host_never_waits(nccl: Ranks) -> None:
    nccl.run(overlapped)


def hidden() -> None:
    group = world()
    buffer = torch.ones(1 << 20, device=this_device())
    started = time.perf_counter()
    handle = group.all_reduce(buffer, wait=False)
    torch.cuda._sleep(2_000_000_000)
    handle.wait()
    (move,) = group.ledger.moves
    assert torch.equal(buffer, torch.full_like(buffer, 2.0))
    assert move.seconds > 0
    assert move.waited < move.seconds
    assert move.start + move.seconds < move.wait_start, "complete long before the sleep ended"
    assert started - ALLOWED <= move.start
    assert group.ledger.busy() == pytest.approx(move.seconds)
    assert group.ledger.hidden() == pytest.approx(move.seconds)


def test_a_collective_behind_computation_is_hidden(nccl: Ranks) -> None:
    nccl.run(hidden)


def message() -> None:
    """A receive that is posted ahead, and a send after some time: the receiver's stream waits."""
    group = world()
    assert not group.waits_on_host(this_device())
    tensor = torch.full((4,), float(group.rank), device=this_device())
    if group.rank == 0:
        torch.cuda._sleep(500_000_000)
        handle = group.send(tensor, 1, wait=False)
    else:
        handle = group.recv(tensor, 0, wait=False)
    handle.wait()
    (move,) = group.ledger.moves
    assert tensor.tolist() == [0.0] * 4
    assert 0 < move.waited <= move.seconds
    group.barrier()


def test_messages_are_measured(nccl: Ranks) -> None:
    nccl.run(message)


def both_kinds() -> None:
    with pytest.raises(UserError, match="got tensors on cpu and backends nccl for cuda"):
        world().all_reduce(torch.ones(2))
    process_group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    assert isinstance(process_group, dist.ProcessGroup)
    group = group_over("data", process_group, Ledger())
    group.connect(this_device())
    for device in (torch.device("cpu"), this_device()):
        assert group.waits_on_host(device) == (device.type == "cpu")
        tensor = torch.full((3,), float(group.rank + 1), device=device)
        group.all_reduce(tensor)
        assert tensor.tolist() == [3.0] * 3
        if group.rank == 0:
            group.send(tensor, 1)
        else:
            received = torch.zeros(3, device=device)
            group.recv(received, 0)
            assert torch.equal(received, tensor)
    assert all(move.seconds > 0 for move in group.ledger.moves)
    group.close()


def test_a_group_with_two_backends_moves_tensors_of_both_devices(nccl: Ranks) -> None:
    nccl.run(both_kinds)
