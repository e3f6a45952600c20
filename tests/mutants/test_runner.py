"""The runner tells apart mutants that tests find, miss, hang on, or cannot run with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.runner import FOUND, HANGING, INVALID, SURVIVED, Runner

_SOURCE = """
def after(n):
    while n < 0:
        n += 1
    return n + 1
"""

_TESTS = """
import pytest
from echelon.toy import after

def test_after():
    assert after(-1) == 1

@pytest.mark.slow
def test_after_a_large_number():
    assert after(100) == 101
"""

_OPTIONS = """
[tool.pytest.ini_options]
addopts = "-m 'not slow'"
markers = ["slow: runs where quick ones find nothing"]
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "src/echelon").mkdir(parents=True)
    (folder / "src/echelon/__init__.py").write_text("")
    (folder / "src/echelon/toy.py").write_text(_SOURCE)
    (folder / "tests").mkdir()
    (folder / "tests/test_toy.py").write_text(_TESTS)
    (folder / "tests/test_wrong.py").write_text(_TESTS.replace("== 1", "== 3"))
    (folder / "pyproject.toml").write_text(_OPTIONS)
    return folder


@pytest.fixture(scope="module")
def runner(checkout: Path) -> Iterator[Runner]:
    with Runner(checkout, preloaded=[], jobs=2) as runner:
        yield runner


def toy_mutant(old: str, new: str) -> Mutant:
    return Mutant(f"{old} to {new}", "toy.py", old, new, ("tests/test_toy.py",))


@pytest.mark.slow
def test_outcomes(checkout: Path, runner: Runner) -> None:
    expected = {
        toy_mutant("return n + 1", "return n + 2"): FOUND,
        toy_mutant("return n + 1", "return min(n, 9) + 1"): FOUND,
        toy_mutant("return n + 1", "return 1 + n"): SURVIVED,
        toy_mutant("return n + 1", "return (n + 1"): INVALID,
    }
    assert runner.check_clean(["tests/test_toy.py"], timeout=60.0) is None
    outcomes = list(runner.run_all(list(expected)))
    assert {outcome.mutant: outcome.result for outcome in outcomes} == expected
    assert [outcome.is_found for outcome in outcomes] == [True, True, False, False]
    assert "SyntaxError" in outcomes[3].output
    assert (checkout / "src/echelon/toy.py").read_text() == _SOURCE, "the tree is not changed"


@pytest.mark.slow
def test_a_mutant_that_hangs_is_found(checkout: Path) -> None:
    with Runner(checkout, preloaded=[], timeout=3.0) as runner:
        outcome = runner.run(toy_mutant("n += 1", "n += 0"))
    assert (outcome.result, outcome.is_found) == (HANGING, True)


@pytest.mark.slow
def test_tests_that_fail_without_a_mutant_are_reported(runner: Runner) -> None:
    output = runner.check_clean(["tests/test_wrong.py"], timeout=60.0)
    assert output is not None
    assert "assert 1 == 3" in output
