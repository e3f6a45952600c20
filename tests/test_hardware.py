import os
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.nn.functional as F
from torch import nn

import echelon
from echelon import hardware
from echelon.launching import Ranks
from tests.cases import adamw


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [("max 100000", None), ("", None), ("250000 100000", 2), ("50000 100000", 1), ("400000 100000\n", 4)],
)
def test_cores_in_a_cgroup_quota(cpu_max: str, cores: int | None) -> None:
    assert hardware.quota_cores(cpu_max) == cores


def test_a_containers_limits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("1048576\n")
    monkeypatch.setattr(hardware, "_CGROUP", tmp_path)

    assert hardware.usable_cores() == 1
    assert hardware.total_memory() == 2**20
    assert hardware.available_memory() in (None, 2**20)


def test_without_limits_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")

    assert 1 <= hardware.usable_cores() <= (os.cpu_count() or 1)
    assert hardware.total_memory() > 2**20
    assert hardware.cpu_model()


# As torch 2.11 to 2.13 write them, on ARM and on x86-64.
TORCH_MESSAGES = (
    "mkldnn_matmul failed, switching to BLAS gemm:mkldnn_matmul: mkldnn_matmul bf16 path needs a cpu with "
    "bf16 support\nException raised from mkldnn_matmul at Matmul.cpp:170\nframe #0: c10::Error::Error",
    "mkldnn_bf16_gemm failed, switching to BLAS gemm: could not create a primitive",
    "mkldnn_linear: bf16 path needs the cpu support avx_ne_convert or avx512bw, avx512vl and avx512dq",
)


def warnings_that_pass() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        for message in (*TORCH_MESSAGES, "another failed, switching to BLAS gemm"):
            warnings.warn(message, stacklevel=1)
    return [str(each.message) for each in caught]


def test_torchs_warnings_about_the_processor_are_hidden_in_ranks(warm_ranks: Callable[[int], Ranks]) -> None:
    assert warm_ranks(1).run(warnings_that_pass) == [["another failed, switching to BLAS gemm"]]


def test_torchs_warnings_about_the_processor_are_hidden_beside_an_engine() -> None:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("always")
        assert len(warnings_that_pass()) == 4
        with echelon.parallelize(nn.Linear(2, 2), "data=1", optimizer=adamw, loss=F.mse_loss):
            assert len(warnings_that_pass()) == 1


def test_pytest_hides_the_same_warnings() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    filters = project["tool"]["pytest"]["ini_options"]["filterwarnings"]
    assert {f"ignore:{message}" for message in hardware.TORCH_WARNINGS} < {*filters}
