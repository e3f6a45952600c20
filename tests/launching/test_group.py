import itertools
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from echelon.errors import UserError
from echelon.launching import Ranks, group
from echelon.launching.group import host_id, init_group, local_rank, report_current, report_visible, timeout
from echelon.launching.placement import RankReport
from tests.launching import tasks


class Joins:
    """Records what `init_group` does with GPUs and torch, for ranks that are threads of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options: dict[int, dict[str, Any]] = {}
        self.devices: list[torch.device] = []
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # so that it is restored after the test
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
        monkeypatch.setattr(group, "_numbers", itertools.repeat(0))
        monkeypatch.setattr(group, "_mark_checked", lambda _: None)
        monkeypatch.setattr(torch.cuda, "set_device", self.devices.append)
        monkeypatch.setattr(dist, "init_process_group", self._init)
        self._monkeypatch = monkeypatch

    def _init(self, backend: str, **options: Any) -> None:
        self.options[options["rank"]] = {"backend": backend, **options}

    def join(self, gpus: list[str], backend: str | None = None) -> list[BaseException | None]:
        """Rank r of one host sees the GPUs `gpus[r]`, each named by a letter; what each rank raised."""
        store = HashStore()

        def join_rank(rank: int) -> None:
            init_group(store, rank, len(gpus), backend, timeout(60))

        reports = iter([RankReport("a", "id", None, tuple(seen)) for seen in gpus])
        self._monkeypatch.setattr(group, "report_visible", lambda: next(reports))
        with ThreadPoolExecutor(len(gpus)) as pool:
            return [future.exception() for future in [pool.submit(join_rank, r) for r in range(len(gpus))]]


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> Joins:
    return Joins(monkeypatch)


def test_over_nccl_a_rank_binds_its_device(joins: Joins, capsys: pytest.CaptureFixture[str]) -> None:
    assert joins.join(["xy", "xy"]) == [None, None]
    bound = [(joins.options[rank]["backend"], joins.options[rank]["device_id"]) for rank in range(2)]
    assert bound == [("nccl", torch.device("cuda", 0)), ("nccl", torch.device("cuda", 1))]
    assert sorted(device.index for device in joins.devices) == [0, 1]
    assert capsys.readouterr().err == ""


def test_ranks_that_share_a_gpu_use_gloo_and_rank_0_says_so(
    joins: Joins, capsys: pytest.CaptureFixture[str]
) -> None:
    assert joins.join(["x", "x"]) == [None, None]
    assert [joins.options[rank]["device_id"] for rank in range(2)] == [None, None]
    assert [device.index for device in joins.devices] == [0, 0], "they still compute on it"
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("echelon: 2 ranks share 1 GPU on host a, so they use Gloo")
    assert said.err.count("\n") == 1


def test_without_gpus_nothing_is_said(joins: Joins, capsys: pytest.CaptureFixture[str]) -> None:
    assert joins.join(["", ""]) == [None, None]
    assert joins.options[1]["backend"] == "gloo"
    assert joins.devices == []
    assert capsys.readouterr().err == ""


def test_ranks_with_one_environment_need_no_exchange(joins: Joins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "report_visible", lambda: RankReport("a", "id", 7, ("x", "y", "z")))
    monkeypatch.setattr(group, "agree", None)
    init_group(HashStore(), 2, 3, None, timeout(60), same_host=True)
    assert joins.options[2]["backend"] == "nccl"
    assert joins.devices == [torch.device("cuda", 2)]


def test_no_rank_joins_if_the_hosts_differ(joins: Joins) -> None:
    errors = joins.join(["x", ""])
    assert [type(error) for error in errors] == [UserError, UserError]
    assert str(errors[0]) == str(errors[1])
    assert joins.options == {}


def test_cuda_gets_enough_queues_unless_the_user_chose(
    joins: Joins, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))  # MPS runs
    joins.join([""])
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "no"))
    joins.join([""])
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    joins.join([""])
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_a_group_is_asked_for_its_backends(warm_ranks: Callable[[int], Ranks]) -> None:
    assert warm_ranks(2).run(tasks.kinds_of_backends) == [["gloo", "gloo", "gloo", None]] * 2


def test_the_limit_is_that_of_the_group_that_was_joined_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stayed when the group was left, and limited the groups of one that the user initialised later."""
    monkeypatch.setattr(group, "_checked_world", None)
    limits = [group.operation_limit()]
    with single_rank():
        init_group(HashStore(), 0, 1, "gloo", timeout(60))
        limits.append(group.operation_limit())
    limits.append(group.operation_limit())
    with single_rank():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        limits.append(group.operation_limit())
        group.check_world()
        limits.append(group.operation_limit())
    assert limits == [None, timedelta(seconds=60), None, None, None]


@contextmanager
def single_rank() -> Iterator[None]:
    """Leaves the process group of this process, the only rank."""
    try:
        yield
    finally:
        group.leave()


def test_two_ranks_on_one_gpu_are_refused_on_every_rank(warm_ranks: Callable[[int], Ranks]) -> None:
    first, second = warm_ranks(2).run(tasks.join_on_gpus, ["x", "x"])
    assert first == second
    assert "  - host this host (ranks 0, 1): 1 GPU, which ranks share" in first
    assert warm_ranks(2).run(tasks.join_on_gpus, ["x", "y"]) == ["", ""]


def test_no_timeout_overflows_poll() -> None:
    """torch hands a timeout to poll() as milliseconds in 32 bits."""
    for seconds in (None, 1e9, float("inf")):
        assert 2e6 < timeout(seconds).total_seconds() < 2**31 / 1000
    assert timeout(2.5).total_seconds() == 2.5


NAMES = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "NCCL_HOSTID"):
        monkeypatch.delenv(name, raising=False)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, *uuids: str, current: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(uuids))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))


def test_the_first_launcher_that_numbers_the_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_rank() is None
    for number, name in reversed(list(enumerate(NAMES))):
        monkeypatch.setenv(name, str(number))
        assert local_rank() == number


def test_a_number_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_LOCALID", "first")
    with pytest.raises(UserError, match="SLURM_LOCALID='first' in the environment: must be an integer"):
        local_rank()


def test_nccl_decides_what_a_host_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_id().startswith(socket.gethostname())
    monkeypatch.setenv("NCCL_HOSTID", "host of rank 3")
    assert host_id() == "host of rank 3"
    assert report_visible().host == socket.gethostname()


def test_a_host_of_the_same_name_is_another_one(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    boots = iter(("first", "second"))
    boot_id = SimpleNamespace(exists=lambda: True, read_text=lambda: next(boots) + "\n")
    monkeypatch.setattr(group, "_BOOT_ID", boot_id)
    assert host_id() != host_id()


def test_all_visible_gpus_are_reported_or_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    pretend_gpus(monkeypatch, "GPU-x", "GPU-y", current=1)
    assert report_visible()[2:] == (1, ("GPU-x", "GPU-y"))
    assert report_current()[2:] == (1, ("GPU-y",))
    pretend_gpus(monkeypatch)
    assert report_visible().gpus == report_current().gpus == ()


def test_cuda_that_was_started_before_the_fork_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reports no GPU in such a process, so the rank would train on the CPU without a word."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(UserError, match=r"CUDA was started in the fork server.*echelon\.launching\.preload"):
        report_visible()


LENGTHS = [[0, 3, 6], [1024, 1025, 0], [5000, 1, 1024], [0, 0, 0]]


def expected(lengths: list[int]) -> list[bytes]:
    return [tasks.bytes_of(rank, length) for rank, length in enumerate(lengths)]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_bytes_of_different_length_are_gathered_everywhere(
    lengths: list[int], warm_ranks: Callable[[int], Ranks]
) -> None:
    assert warm_ranks(3).run(tasks.all_gather, lengths) == [expected(lengths)] * 3


@pytest.mark.parametrize("chunk", [1000, 100_000])
def test_bytes_go_to_rank_0_and_from_there(chunk: int, warm_ranks: Callable[[int], Ranks]) -> None:
    lengths = [5000, 1, 2500]
    results = warm_ranks(3).run(tasks.gather_and_broadcast, lengths, chunk)
    assert [gathered for gathered, _ in results] == [expected(lengths), [], []]
    assert [first for _, first in results] == [expected(lengths)[0]] * 3
