"""`echelon.NAME`: as an attribute and as a module, found on first use."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import echelon

MODULES = {
    "data": "echelon.data",
    "experts": "echelon.nn.experts",
    "integrations": "echelon.train.integrations",
    "optim": "echelon.update.optim",
    "sequence": "echelon.nn.sequence",
}
USER_PROGRAM = """
import echelon
import echelon.experts
from echelon.data import loader
from echelon.experts import Experts
from echelon.optim import SM3
from echelon.sequence import View

optimizer: type[SM3] = echelon.optim.SM3
module: type[Experts] = echelon.experts.Experts
number: int = echelon.optim.SM3
"""


@pytest.mark.parametrize("name", echelon.__all__)
def test_a_public_name_is_an_attribute(name: str) -> None:
    assert getattr(echelon, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'echelon' has no attribute 'optimise'"):
        echelon.optimise  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import echelon.{}", "echelon.{}", "from echelon import {}"])
def test_a_module_has_one_object_under_both_names(first: str) -> None:
    lines = ["import echelon, sys", "assert 'torch' not in sys.modules"]
    for name, home in MODULES.items():
        lines += [first.format(name), f"import {home} as home", f"import echelon.{name} as module"]
        lines += [f"assert home is module is echelon.{name} is sys.modules['echelon.{name}']"]
        lines += [f"assert home.__name__ == home.__spec__.name == {home!r}"]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=300)


def test_a_class_has_one_identity_under_both_names() -> None:
    short, home = importlib.import_module("echelon.optim"), importlib.import_module("echelon.update.optim")
    assert short.SM3 is home.SM3


@pytest.mark.slow
def test_a_type_checker_sees_the_names(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(USER_PROGRAM, encoding="utf-8")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(program)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
    )
    (error, _) = checked.stdout.splitlines()
    assert error.startswith("program.py:11: error: Incompatible types in assignment"), checked.stdout
