import resource
import warnings

import pytest
import torch

from echelon.cli.doctor import machine
from echelon.cli.doctor.report import Finding
from echelon.quantities import GIB


@pytest.mark.parametrize(
    ("enough", "too_little", "fix"),
    [
        (machine.judge_cores(2), machine.judge_cores(1), "ranks take turns"),
        (machine.judge_memory(8 * GIB, GIB), machine.judge_memory(8 * GIB, GIB - 1), "close other programs"),
        (machine.judge_shared_memory(GIB), machine.judge_shared_memory(64 * 2**20), "--shm-size=8g"),
        (machine.judge_disk(GIB), machine.judge_disk(GIB - 1), "make room"),
        (machine.judge_open_files(1024), machine.judge_open_files(256), "ulimit -n 4096"),
    ],
)
def test_too_little_is_a_warning_with_a_fix(enough: Finding, too_little: Finding, fix: str) -> None:
    assert (enough.status, enough.remark) == ("ok", "")
    assert too_little.status == "warn"
    assert fix in too_little.remark


def test_what_a_system_does_not_have_is_no_warning() -> None:
    assert machine.judge_memory(GIB, available=None) == Finding("memory", "1.0 GiB", number=GIB)
    assert machine.judge_shared_memory(None).status == "note"
    assert machine.judge_open_files(resource.RLIM_INFINITY).value == "no limit"


def test_devices_name_the_backend_of_a_launch() -> None:
    findings = {finding.name: finding for finding in machine.examine_devices().findings}

    assert "gloo" in findings["backends"].value
    assert findings["launch of 2 ranks uses"].value in ("gloo", "nccl")


def test_an_unfit_driver_is_a_warning_in_torchs_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def unfit() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", unfit)

    cuda = machine.examine_devices().findings[0]

    assert (cuda.name, cuda.value, cuda.status) == ("CUDA devices", "none", "warn")
    assert "too old" in cuda.remark
