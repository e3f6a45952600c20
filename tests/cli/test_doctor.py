"""`echelon doctor`: a table for a person, one object for a program."""

import json

import pytest

from echelon.cli import doctor
from echelon.cli.doctor import Finding, Report, Section
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
