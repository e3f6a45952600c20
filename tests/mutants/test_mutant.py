"""The list of mutants is in order: each change can be made, and its tests exist."""

import re
from collections import Counter
from pathlib import Path

import pytest

from echelon.plan.plan import RULES
from tests.mutants.mutant import Mutant, load_mutants

TOY = Mutant("off-by-one", "toy.py", "n + 1", "n + 2", ("tests/test_toy.py::test_next",))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "src/echelon").mkdir(parents=True)
    (tmp_path / "src/echelon/toy.py").write_text("def after(n):\n    return n + 1\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_toy.py").write_text("def test_next():\n    pass\n")
    return tmp_path


def test_every_mutant_of_the_list_can_be_run() -> None:
    assert [error for mutant in load_mutants() for error in mutant.errors()] == []


def test_the_list_has_at_least_100_mutants_of_different_names_and_changes() -> None:
    mutants = load_mutants()
    assert len(mutants) >= 100
    names = Counter(mutant.name for mutant in mutants)
    changes = Counter((mutant.file, mutant.old, mutant.new) for mutant in mutants)
    assert [each for each, count in (names + changes).items() if count > 1] == []


def test_every_plan_rule_has_a_mutant() -> None:
    words = (re.sub(r"[^a-z0-9]+", "-", rule.case.lower()).strip("-") for rule in RULES)
    assert {f"plan-rule-deleted-{case}" for case in words} <= {mutant.name for mutant in load_mutants()}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"file": "other.py"}, "other.py does not exist"),
        ({"old": "n - 1"}, "`old` occurs 0 times in toy.py"),
        ({"old": "n"}, "`old` occurs 3 times in toy.py"),
        ({"new": "n + 1"}, "`new` is the same as `old`"),
        ({"tests": ()}, "no tests are named for it"),
        ({"tests": ("tests/test_other.py",)}, "tests/test_other.py does not exist"),
        ({"tests": ("tests/test_toy.py::test_last[0]",)}, "tests/test_toy.py::test_last[0] does not exist"),
    ],
)
def test_what_is_wrong_with_a_mutant_is_reported(
    checkout: Path, changes: dict[str, object], error: str
) -> None:
    (reported,) = Mutant(**(vars(TOY) | changes)).errors(checkout)  # type: ignore[arg-type]
    assert reported.startswith(f"off-by-one: {error}")


def test_a_change_is_made_in_the_copy_and_its_compiled_file_is_dropped(checkout: Path) -> None:
    assert list(TOY.errors(checkout)) == []
    cache = checkout / "src/echelon/__pycache__"
    cache.mkdir()
    for name in ("toy.cpython-312.pyc", "toys.cpython-312.pyc"):
        (cache / name).write_bytes(b"")
    TOY.apply(checkout / "src")
    assert "return n + 2" in (checkout / "src/echelon/toy.py").read_text()
    assert [path.name for path in cache.iterdir()] == ["toys.cpython-312.pyc"]
