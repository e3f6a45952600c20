"""`echelon doctor`: a table for a person, one object for a program."""

import json
import subprocess
import sys

import pytest

from echelon.cli import doctor
from echelon.cli.doctor import Finding, Report, Section, examine
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
