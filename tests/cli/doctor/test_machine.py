import re
import resource
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.cli.doctor import Finding, machine
from echelon.errors import UserError
from echelon.launching import RankFailed, Ranks
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


ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0", "2.13.1", "2.13.0+cpu", "2.13.0+cu129"])
def test_a_tested_torch_is_ok(version: str) -> None:
    assert machine.judge_torch(version) == Finding("torch", version)


@pytest.mark.parametrize("version", ["2.10.3", "1.13.1"])
def test_an_older_torch_is_a_warning_that_says_which_to_install(version: str) -> None:
    finding = machine.judge_torch(version)

    assert (finding.value, finding.status) == (version, "warn")
    assert finding.remark == 'required: pip install "torch>=2.11" (tested with: 2.11 to 2.13)'


@pytest.mark.parametrize("version", ["2.14.0a0+git1234", "3.0.0"])
def test_a_newer_torch_is_a_note(version: str) -> None:
    finding = machine.judge_torch(version)

    assert (finding.value, finding.status) == (version, "note")
    assert "newer than echelon was tested with: 2.11 to 2.13" in finding.remark


def test_what_the_package_requires_is_what_doctor_calls_required(monkeypatch: pytest.MonkeyPatch) -> None:
    # pydantic and typer were listed as optional, and the command does not start without them.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [re.split("[<>=]", entry)[0] for entry in project["dependencies"]] == ["torch", *machine.REQUIRED]
    monkeypatch.setattr(machine, "installed", lambda name: None if name in machine.REQUIRED else "3.0")
    missing = [finding for finding in machine.examine_versions().findings if finding.value == "missing"]
    assert [(finding.name, finding.status, finding.remark) for finding in missing] == [
        (name, "warn", f"required: pip install {name}") for name in machine.REQUIRED
    ]


def test_every_optional_package_is_one_that_the_code_imports() -> None:
    # tokenizers and wandb were promised, and nothing in echelon used them.
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for name in machine.EXTRAS:
        pattern = rf"(import|from) ([a-z.]+\.)?{name}|import_module\(\"{name}"
        assert re.search(pattern, sources), name


def test_a_missing_package_that_is_needed_is_a_warning() -> None:
    torch = machine.judge_torch(None)
    assert (torch.value, torch.status) == ("missing", "warn")
    assert 'pip install "torch>=2.11"' in torch.remark


def test_a_missing_extra_is_a_note_with_its_cost_and_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "installed", lambda _: None)
    extras = {finding.name: finding for finding in machine.examine_extras().findings}
    assert extras.keys() == machine.EXTRAS.keys()
    assert {finding.status for finding in extras.values()} == {"note"}
    assert 'pip install "echelon[hf]"' in extras["transformers"].remark


def test_an_old_python_is_a_warning() -> None:
    assert machine.judge_python("3.10.14").status == "warn"
    assert machine.judge_python("3.14.0").status == "ok"


def test_packages_are_found_by_what_is_installed() -> None:
    assert machine.installed("torch")
    assert machine.installed("no-such-package-of-ours") is None
    assert {finding.status for finding in machine.examine_versions().findings} == {"ok"}


def test_ranks_time_a_large_and_a_small_all_reduce(warm_ranks: Callable[[int], Ranks]) -> None:
    for seconds in warm_ranks(2).run(machine.time_all_reduce):
        assert seconds.large > seconds.small > 0


@pytest.mark.slow_cases("error1")
@pytest.mark.parametrize("error", [RankFailed(1, "was killed", "a traceback"), UserError("no ranks here")])
def test_ranks_that_do_not_start_are_a_warning(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Ranks:
        raise error

    monkeypatch.setattr(machine, "Ranks", refuse)

    finding = machine.examine_speed().findings[-1]

    assert (finding.name, finding.value, finding.status) == ("launch of 2 ranks", "fails", "warn")
    assert str(error).splitlines()[0] in finding.remark
    assert "a traceback" not in finding.remark


def test_measuring_leaves_the_number_of_threads_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_two_ranks", list)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        findings = machine.examine_speed().findings
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)

    assert [finding.status for finding in findings] == ["ok", "ok"]
    assert all(finding.number for finding in findings)
