import socket
from types import SimpleNamespace

import pytest
import torch

from echelon.errors import UserError
from echelon.launching import group as rank_report
from echelon.launching.group import host_id, local_rank, report_current, report_visible

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
    monkeypatch.setattr(rank_report, "_BOOT_ID", boot_id)
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
