import json
import subprocess
import sys

import pytest

from echelon.cli.doctor import examine


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
