"""`echelon doctor`: a table for a person, one object for a program."""

import io
import json
import re
import resource
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from echelon.cli import doctor
from echelon.cli.doctor import Finding, Report, Section, examine, render, section
from echelon.errors import UserError
from echelon.launching import RankFailed, Ranks
from echelon.quantities import GIB
from tests.cli.commands import output


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = (Finding("cores", "1", "warn", "no speed to gain"), Finding("disk", "3 GiB free", number=3.0))
    monkeypatch.setattr(doctor, "examine", lambda: Report((Section("Machine", findings),)))


def test_a_table_with_a_count_of_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = output(capsys, "doctor")
    assert (code, err) == (0, "")
    assert "no speed to gain" in out
    assert "1 warning: see the lines with !" in out


def test_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = output(capsys, "doctor", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["warnings"] == 1
    assert [finding["name"] for finding in report["sections"][0]["findings"]] == ["cores", "disk"]


def test_the_data_part_needs_none_of_the_packages_for_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pydantic", "rich", "typer"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it now fails

    report = examine()

    titles = [section.title for section in report.sections]
    assert titles == ["Versions", "Machine", "Devices", "Measured here", "Optional packages"]
    assert not [finding for finding in report.findings if finding.value in ("unknown", "fails")]
    measured = {finding.name: finding.number for finding in report.sections[3].findings}
    assert len(measured) == 5
    assert all(measured.values())
    json.dumps(report.to_dict())


def test_importing_it_imports_neither_torch_nor_pydantic() -> None:
    program = "import echelon.cli.doctor, sys; print({'torch', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("enough", "too_little", "fix"),
    [
        (doctor.judge_cores(2), doctor.judge_cores(1), "ranks take turns"),
        (doctor.judge_memory(8 * GIB, GIB), doctor.judge_memory(8 * GIB, GIB - 1), "close other programs"),
        (doctor.judge_shared_memory(GIB), doctor.judge_shared_memory(64 * 2**20), "--shm-size=8g"),
        (doctor.judge_disk(GIB), doctor.judge_disk(GIB - 1), "make room"),
        (doctor.judge_open_files(1024), doctor.judge_open_files(256), "ulimit -n 4096"),
    ],
)
def test_too_little_is_a_warning_with_a_fix(enough: Finding, too_little: Finding, fix: str) -> None:
    assert (enough.status, enough.remark) == ("ok", "")
    assert too_little.status == "warn"
    assert fix in too_little.remark


def test_what_a_system_does_not_have_is_no_warning() -> None:
    assert doctor.judge_memory(GIB, available=None) == Finding("memory", "1.0 GiB", number=GIB)
    assert doctor.judge_shared_memory(None).status == "note"
    assert doctor.judge_open_files(resource.RLIM_INFINITY).value == "no limit"


def test_devices_name_the_backend_of_a_launch() -> None:
    findings = {finding.name: finding for finding in doctor.examine_devices().findings}

    assert "gloo" in findings["backends"].value
    assert findings["launch of 2 ranks uses"].value in ("gloo", "nccl")


def test_an_unfit_driver_is_a_warning_in_torchs_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def unfit() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", unfit)

    cuda = doctor.examine_devices().findings[0]

    assert (cuda.name, cuda.value, cuda.status) == ("CUDA devices", "none", "warn")
    assert "too old" in cuda.remark


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0", "2.13.1", "2.13.0+cpu", "2.13.0+cu129"])
def test_a_tested_torch_is_ok(version: str) -> None:
    assert doctor.judge_torch(version) == Finding("torch", version)


@pytest.mark.parametrize("version", ["2.10.3", "1.13.1"])
def test_an_older_torch_is_a_warning_that_says_which_to_install(version: str) -> None:
    finding = doctor.judge_torch(version)

    assert (finding.value, finding.status) == (version, "warn")
    assert finding.remark == 'required: pip install "torch>=2.11" (tested with: 2.11 to 2.13)'


@pytest.mark.parametrize("version", ["2.14.0a0+git1234", "3.0.0"])
def test_a_newer_torch_is_a_note(version: str) -> None:
    finding = doctor.judge_torch(version)

    assert (finding.value, finding.status) == (version, "note")
    assert "newer than echelon was tested with: 2.11 to 2.13" in finding.remark


def test_what_the_package_requires_is_what_doctor_calls_required(monkeypatch: pytest.MonkeyPatch) -> None:
    # pydantic and typer were listed as optional, and the command does not start without them.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [re.split("[<>=]", entry)[0] for entry in project["dependencies"]] == ["torch", *doctor.REQUIRED]
    monkeypatch.setattr(doctor, "installed", lambda name: None if name in doctor.REQUIRED else "3.0")
    missing = [finding for finding in doctor.examine_versions().findings if finding.value == "missing"]
    assert [(finding.name, finding.status, finding.remark) for finding in missing] == [
        (name, "warn", f"required: pip install {name}") for name in doctor.REQUIRED
    ]


def test_every_optional_package_is_one_that_the_code_imports() -> None:
    # tokenizers and wandb were promised, and nothing in echelon used them.
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for name in doctor.EXTRAS:
        pattern = rf"(import|from) ([a-z.]+\.)?{name}|import_module\(\"{name}"
        assert re.search(pattern, sources), name


def test_a_missing_package_that_is_needed_is_a_warning() -> None:
    torch = doctor.judge_torch(None)
    assert (torch.value, torch.status) == ("missing", "warn")
    assert 'pip install "torch>=2.11"' in torch.remark


def test_a_missing_extra_is_a_note_with_its_cost_and_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", lambda _: None)
    extras = {finding.name: finding for finding in doctor.examine_extras().findings}
    assert extras.keys() == doctor.EXTRAS.keys()
    assert {finding.status for finding in extras.values()} == {"note"}
    assert 'pip install "echelon[hf]"' in extras["transformers"].remark


def test_an_old_python_is_a_warning() -> None:
    assert doctor.judge_python("3.10.14").status == "warn"
    assert doctor.judge_python("3.14.0").status == "ok"


def test_packages_are_found_by_what_is_installed() -> None:
    assert doctor.installed("torch")
    assert doctor.installed("no-such-package-of-ours") is None
    assert {finding.status for finding in doctor.examine_versions().findings} == {"ok"}


def test_ranks_time_a_large_and_a_small_all_reduce(warm_ranks: Callable[[int], Ranks]) -> None:
    for large, small in warm_ranks(2).run(doctor.time_all_reduce):
        assert large > small > 0


@pytest.mark.slow_cases("error1")
@pytest.mark.parametrize("error", [RankFailed(1, "was killed", "a traceback"), UserError("no ranks here")])
def test_ranks_that_do_not_start_are_a_warning(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Ranks:
        raise error

    monkeypatch.setattr(doctor, "Ranks", refuse)

    finding = doctor.examine_speed().findings[-1]

    assert (finding.name, finding.value, finding.status) == ("launch of 2 ranks", "fails", "warn")
    assert str(error).splitlines()[0] in finding.remark
    assert "a traceback" not in finding.remark


def test_measuring_leaves_the_number_of_threads_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_two_ranks", list)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        findings = doctor.examine_speed().findings
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)

    assert [finding.status for finding in findings] == ["ok", "ok"]
    assert all(finding.number for finding in findings)


def fail() -> list[Finding]:
    raise OSError("no such device")


def test_a_probe_that_fails_is_a_finding_and_the_others_still_answer() -> None:
    machine = section("Machine", {"tape": fail, "cores": lambda: [Finding("cores", "2")]})

    tape, cores = machine.findings
    assert (tape.name, tape.value, tape.status) == ("tape", "unknown", "note")
    assert "OSError: no such device" in tape.remark
    assert cores == Finding("cores", "2")


def test_a_report_is_plain_data_that_counts_its_warnings() -> None:
    warning = Finding("open files", "at most 256", "warn", "too few", 256)
    report = Report((Section("A", (Finding("x", "1"),)), Section("B", (warning,))))

    data = json.loads(json.dumps(report.to_dict()))

    assert report.warnings == [warning]
    assert data["warnings"] == 1
    assert data["sections"][1]["findings"] == [
        {"name": "open files", "value": "at most 256", "status": "warn", "remark": "too few", "number": 256}
    ]


WARNING = Finding("open files", "at most 256", "warn", "in this shell: ulimit -n 4096")


def text_of(*findings: Finding) -> str:
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(render(Report((Section("Machine", findings),))))
    return console.export_text()


def test_every_finding_is_a_line_with_its_remark() -> None:
    text = text_of(Finding("cores", "2"), WARNING)

    assert "Machine" in text
    assert "✓  cores" in text
    assert "!  open files  at most 256  in this shell: ulimit -n 4096" in text


def test_the_last_line_counts_warnings() -> None:
    assert text_of(Finding("cores", "2")).rstrip().endswith("No problems found.")
    assert "1 warning:" in text_of(WARNING)
    assert "2 warnings:" in text_of(WARNING, WARNING)


def test_what_a_machine_says_is_never_markup() -> None:
    assert "[/red]CPU[bold]" in text_of(Finding("processor", "[/red]CPU[bold]"))
