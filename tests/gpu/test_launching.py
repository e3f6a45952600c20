"""Ranks on a GPU, over NCCL and Gloo: devices, deaths and hangs. Run by hand: pytest -m gpu tests/gpu

Each rank has an NCCL_HOSTID of its own, so that NCCL takes it for a host of its own and several ranks can use
one GPU, over loopback sockets.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from echelon.collectives.mesh import this_device
from echelon.errors import UserError
from echelon.launching import RankFailed, RankHung, Ranks, enter_operation, join, leave_operation
from tests.gpu.nccl import environment
from tests.launching.processes import still_alive

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RANKS = 4
DEADLINE = 10.0
SPARE = 5.0  # seconds after the deadline, or after a death, until the launcher has raised


@contextmanager
def nccl_ranks() -> Iterator[Ranks]:
    with Ranks(RANKS, deadline=DEADLINE, environment=environment) as ranks:
        yield ranks


def test_every_rank_has_a_device_and_more_ranks_share_them() -> None:
    """In a process of its own: in this one other tests have started CUDA, and a launch must not need it."""
    script = Path(__file__).parents[1] / "launching" / "scripts" / "uses_devices.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    devices = torch.cuda.device_count()
    alone, together, is_initialized = json.loads(done.stdout)
    assert alone == [["nccl", rank, [devices] * 3] for rank in range(devices)]
    assert together == [["gloo", rank % devices, [devices + 1] * 3] for rank in range(devices + 1)]
    assert not is_initialized, "the parent needs no memory on a device"
    assert f"echelon: {devices + 1} ranks share {devices} GPU" in done.stderr


def sum_over_nccl() -> tuple[str, str, float]:
    total = torch.ones(1, device=this_device())
    dist.all_reduce(total)
    return dist.get_backend(), this_device().type, total.item()


def test_ranks_with_a_host_each_use_nccl_on_one_gpu() -> None:
    with nccl_ranks() as ranks:
        assert ranks.run(sum_over_nccl) == [("nccl", "cuda", RANKS)] * RANKS


def join_own_group(folder: str, backend: str) -> tuple[str, str]:
    """What `join` raises, and the device, in a process group that the user initialised."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(
        backend, store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks
    )
    try:
        join()
    except UserError as error:
        return str(error), this_device().type
    return "", this_device().type


@pytest.mark.parametrize(
    ("backend", "device"), [("cpu:gloo,cuda:nccl", "cuda"), ("gloo", "cuda"), ("cpu:gloo", "cpu")]
)
def test_a_group_of_the_user_may_have_any_backend(backend: str, device: str, tmp_path: Path) -> None:
    with nccl_ranks() as ranks:
        assert ranks.run(join_own_group, str(tmp_path), backend) == [("", device)] * RANKS


def test_two_ranks_on_one_gpu_are_refused_before_nccl_fails(tmp_path: Path) -> None:
    with Ranks(2, backend="gloo", deadline=60.0, environment=lambda _: {"LOCAL_RANK": "0"}) as ranks:
        (first, _), (second, _) = ranks.run(join_own_group, str(tmp_path), "cpu:gloo,cuda:nccl")
    assert first == second
    assert "(ranks 0, 1): 1 GPU, which ranks share" in first


def connected_pid() -> int:
    """The process id of a rank whose NCCL is connected, which takes a while."""
    sum_over_nccl()
    return os.getpid()


def kill_one(victim: int) -> None:
    """All ranks are in one all-reduce but the victim, which dies; the hosts wait for their devices."""
    total = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(total)
    torch.cuda.synchronize()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(total)
    torch.cuda.synchronize()


def test_the_rank_that_was_killed_is_named_and_all_are_ended() -> None:
    with nccl_ranks() as ranks:
        pids = ranks.run(connected_pid)
        start = time.monotonic()
        with pytest.raises(RankFailed, match="rank 2 was killed by SIGKILL"):
            ranks.run(kill_one, 2)
        assert time.monotonic() - start < SPARE
    assert still_alive(pids) == []


def sleep_before_a_collective(sleeper: int) -> None:
    for step in range(2):
        if dist.get_rank() == sleeper and step == 1:
            time.sleep(600)
        total = torch.ones(1, device="cuda")
        enter_operation("all_reduce data")  # as Handle.wait does it: over NCCL the host does not wait there
        dist.all_reduce(total)
        leave_operation()
        read_result(total)


def read_result(total: torch.Tensor) -> float:
    return total.item()


def test_the_rank_that_sleeps_is_named_while_the_others_wait_for_their_devices() -> None:
    with nccl_ranks() as ranks:
        pids = ranks.run(connected_pid)
        start = time.monotonic()
        with pytest.raises(RankHung) as caught:
            ranks.run(sleep_before_a_collective, 1)
        assert time.monotonic() - start < DEADLINE + SPARE
    assert caught.value.rank == 1
    assert "in sleep_before_a_collective (test_launching.py:" in caught.value.reason
    others = [line for line in caught.value.others if not line.startswith("rank 1")]
    assert all("in read_result (test_launching.py:" in line for line in others), others
    assert still_alive(pids) == []
