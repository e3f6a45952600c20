import pytest

from echelon.doctor import packages
from echelon.doctor.report import Finding


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0", "2.13.0+cpu", "2.13.0+cu129"])
def test_a_tested_torch_is_ok(version: str) -> None:
    assert packages.judge_torch(version) == Finding("torch", version)


@pytest.mark.parametrize("version", ["2.10.3", "1.13.1", "2.13.1", "2.14.0a0+git1234", "3.0.0"])
def test_another_torch_is_a_warning_that_says_which_to_install(version: str) -> None:
    finding = packages.judge_torch(version)

    assert (finding.value, finding.status) == (version, "warn")
    assert 'pip install "torch>=2.11,<=2.13.0"' in finding.remark


def test_a_missing_package_that_is_needed_is_a_warning() -> None:
    assert packages.judge_torch(None).status == "warn"
    assert "pip install numpy" in packages.judge_needed("numpy", None).remark


def test_a_missing_extra_is_a_note_with_its_cost_and_its_mend() -> None:
    extras = {extra.name: packages.judge_extra(extra, None) for extra in packages.EXTRAS}

    assert {finding.status for finding in extras.values()} == {"note"}
    assert "job files (JOB.toml)" in extras["pydantic"].remark
    assert 'pip install "echelon[hf]"' in extras["transformers"].remark


def test_an_old_python_is_a_warning() -> None:
    assert packages.judge_python("3.10.14").status == "warn"
    assert packages.judge_python("3.14.0").status == "ok"


def test_packages_are_found_by_what_is_installed() -> None:
    assert packages.installed("torch")
    assert packages.installed("no-such-package-of-ours") is None
    assert {finding.status for finding in packages.examine_versions().findings} == {"ok"}
