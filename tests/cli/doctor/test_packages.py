import re
import tomllib
from pathlib import Path

import pytest

from echelon.cli.doctor import packages
from echelon.cli.doctor.report import Finding

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0", "2.13.1", "2.13.0+cpu", "2.13.0+cu129"])
def test_a_tested_torch_is_ok(version: str) -> None:
    assert packages.judge_torch(version) == Finding("torch", version)


@pytest.mark.parametrize("version", ["2.10.3", "1.13.1"])
def test_an_older_torch_is_a_warning_that_says_which_to_install(version: str) -> None:
    finding = packages.judge_torch(version)

    assert (finding.value, finding.status) == (version, "warn")
    assert finding.remark == 'required: pip install "torch>=2.11" (tested with: 2.11 to 2.13)'


@pytest.mark.parametrize("version", ["2.14.0a0+git1234", "3.0.0"])
def test_a_newer_torch_is_a_note(version: str) -> None:
    finding = packages.judge_torch(version)

    assert (finding.value, finding.status) == (version, "note")
    assert "newer than echelon was tested with: 2.11 to 2.13" in finding.remark


def test_what_the_package_requires_is_what_doctor_calls_required(monkeypatch: pytest.MonkeyPatch) -> None:
    # pydantic and typer were listed as optional, and the command does not start without them.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [re.split("[<>=]", entry)[0] for entry in project["dependencies"]] == ["torch", *packages.REQUIRED]
    monkeypatch.setattr(packages, "installed", lambda name: None if name in packages.REQUIRED else "3.0")
    missing = [finding for finding in packages.examine_versions().findings if finding.value == "missing"]
    assert [(finding.name, finding.status, finding.remark) for finding in missing] == [
        (name, "warn", f"required: pip install {name}") for name in packages.REQUIRED
    ]


def test_every_optional_package_is_one_that_the_code_imports() -> None:
    # tokenizers and wandb were promised, and nothing in echelon used them.
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for extra in packages.EXTRAS:
        pattern = rf"(import|from) ([a-z.]+\.)?{extra.name}|import_module\(\"{extra.name}"
        assert re.search(pattern, sources), extra.name


def test_a_missing_package_that_is_needed_is_a_warning() -> None:
    torch = packages.judge_torch(None)
    assert (torch.value, torch.status) == ("missing", "warn")
    assert 'pip install "torch>=2.11"' in torch.remark
    assert "pip install numpy" in packages.judge_needed("numpy", None).remark


def test_a_missing_extra_is_a_note_with_its_cost_and_its_mend() -> None:
    extras = {extra.name: packages.judge_extra(extra, None) for extra in packages.EXTRAS}

    assert {finding.status for finding in extras.values()} == {"note"}
    assert 'pip install "echelon[hf]"' in extras["transformers"].remark


def test_an_old_python_is_a_warning() -> None:
    assert packages.judge_python("3.10.14").status == "warn"
    assert packages.judge_python("3.14.0").status == "ok"


def test_packages_are_found_by_what_is_installed() -> None:
    assert packages.installed("torch")
    assert packages.installed("no-such-package-of-ours") is None
    assert {finding.status for finding in packages.examine_versions().findings} == {"ok"}
