import os
from pathlib import Path

import pytest

from echelon import hardware


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
