"""The tool that makes mutants: which changes it knows, what it draws, and when it has found one."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.mutants.mutant import PACKAGE, ROOT
from tests.mutants.runner import FOUND, HANGING, INVALID, SURVIVED, Runner
from tests.mutants.sampling.coverage import Coverage, spread
from tests.mutants.sampling.draw import DrawnMutant, draw
from tests.mutants.sampling.operators import Change, changes
from tests.mutants.sampling.verdict import Judge


def changed(source: str) -> set[str]:
    """Every text that one change makes of a source."""
    return {change.made_in(source) for change in changes(source)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", {"(a <= b)"}),
        ("a < b == c", {"(a <= b == c)", "(a < b != c)"}),
        ("a is b or c", {"(a is b and c)", "(a is not b) or c"}),
        ("a in b", {"(a not in b)"}),
        ("ä + b", {"(ä - b)"}),
        ("x // n", {"(x * n)"}),
        ("y = not a", {"y = (a)"}),
        ("y = a if c else b", {"y = (b if c else a)"}),
        ("y = 2", {"y = 3"}),
        ("y = False", {"y = True"}),
        ("if a:\n    b.c()", {"if (not a):\n    b.c()", "if a:\n    pass"}),
        ("y = [a for a in b if a.c]", {"y = [a for a in b if (not a.c)]"}),
        ("def f(x=1):\n    return x", {"def f(x=2):\n    return x", "def f(x=1):\n    return None"}),
        ("def f():\n    raise E(1)", {"def f():\n    pass"}),
        ("def f():\n    x.y = z", {"def f():\n    pass"}),
        ("def f():\n    x += y", {"def f():\n    pass", "def f():\n    x -= y"}),
        ("def f():\n    yield a", {"def f():\n    pass"}),
    ],
)  # fmt: skip
def test_changes(source: str, expected: set[str]) -> None:
    assert changed(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""1 < 2"""',
        "x: Literal[1] | None = y",
        "@f(1)\nclass A: ...",
        "def __repr__(self):\n    return a < b",
        "if TYPE_CHECKING:\n    x = 1",
        'y = f"{a + 1}" + "b"',
        "y = UserError(a + 1)",
        "@abstractmethod\ndef f(x=1): ...",
        "def f():\n    return False",
        "pairs = zip(a, b, strict=True)",
        "x = t.to(d, non_blocking=True)",
    ],
)
def test_what_is_left_alone(source: str) -> None:
    assert all("False" in source for _ in changed(source)), "a constant has a change of its own"


def test_every_change_of_a_package_is_python_and_none_is_the_same() -> None:
    for mutant in draw(15, 1, ["weight_files"]):
        source = (ROOT / PACKAGE / mutant.file).read_text()
        assert ast.dump(ast.parse(mutant.change.made_in(source))) != ast.dump(ast.parse(source))


def test_a_draw_is_spread_over_packages_and_repeats_by_its_seed() -> None:
    packages = ("optim", "weight_files", "offload")
    drawn = draw(26, 7, packages)
    assert len(set(drawn)) == 26
    assert [sum(mutant.package == package for mutant in drawn) for package in packages] == [9, 9, 8]
    assert drawn[9:18] == draw(9, 7, ["weight_files"]) != draw(9, 8, ["weight_files"])
    assert any(mutant.file.startswith("memory/activation_offload/") for mutant in drawn)


def test_tests_of_as_many_files_as_fit_into_the_time() -> None:
    seconds = {f"a.py::test[{case}]": 0.1 for case in range(400)}
    seconds |= {"b.py::test": 20.0, "c.py::test": 9.0, "a.py::other": 0.2, "d.py::test": 25.0}
    chosen = spread(seconds, seconds)
    assert chosen[:4] == ["a.py::test[0]", "c.py::test", "b.py::test", "a.py::other"]
    assert "d.py::test" not in chosen
    assert sum(seconds[test] for test in chosen) <= 30.0
    assert spread(seconds, seconds, "b.py")[:2] == ["b.py::test", "a.py::test[0]"]


_SOURCE = """
LIMIT = 0

def after(n):
    while n < 0:
        n += 1
    return n + 1

def other(n):
    return n * 2
"""

_TESTS = """
import os
from echelon.toy import after, other

def test_after():
    assert after(-1) == 1

def test_that_fails_anyway():
    assert other(1) == 3

def test_other():
    assert other(3) == 6
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "src/echelon").mkdir(parents=True)
    (folder / "src/echelon/__init__.py").write_text("")
    (folder / "src/echelon/toy.py").write_text(_SOURCE)
    (folder / "tests").mkdir()
    (folder / "tests/test_toy.py").write_text(_TESTS)
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return folder


@pytest.fixture(scope="module")
def judge(checkout: Path) -> Iterator[Judge]:
    with Runner(checkout, preloaded=[]) as runner:
        yield Judge(runner, Coverage(dict.fromkeys(ALL, 0.1), {}), patience=4.0)


ALL = tuple(f"tests/test_toy.py::test_{name}" for name in ("that_fails_anyway", "after", "other"))


def toy(text: str, tests: tuple[str, ...] = ALL) -> DrawnMutant:
    """The mutant that makes a line of the toy this one."""
    (change,) = (c for c in changes(_SOURCE) if f"\n    {text}\n" in c.made_in(_SOURCE))
    return DrawnMutant("toy", "toy.py", change, tests)


@pytest.mark.slow
def test_a_failure_counts_only_if_the_test_passes_without_the_change(judge: Judge) -> None:
    found = judge.judge(toy("return (n / 2)"))
    assert (found.result, found.by) == (FOUND, ALL[2])
    assert judge.failing == {ALL[0]}
    assert judge.judge(toy("return (n / 2)", ALL[:2])).result == SURVIVED
    assert judge.judge(toy("return (n / 2)", ALL[:1])).result == INVALID
    assert judge.judge(toy("return (n / 2)", ("tests/test_toy.py::test_gone", ALL[2]))).result == FOUND
    broken = replace(toy("return (n / 2)"), change=Change("toy", 2, 1, 1, "import nothing\n", ""))
    assert judge.judge(broken).result == FOUND


@pytest.mark.slow
def test_tests_that_do_not_end_have_found_it(judge: Judge) -> None:
    hanging = replace(toy("return (n / 2)"), change=next(c for c in changes(_SOURCE) if c.new == "n -= 1"))
    assert judge.judge(hanging).result == HANGING


def test_tests_are_those_of_the_line_or_else_of_its_function(checkout: Path) -> None:
    lines = {"return n * 2": [2], "n += 1": [1]}
    coverage = Coverage(dict.fromkeys(ALL, 0.1), {"toy.py::other": lines, "toy.py::after": {"x": [0]}})
    assert coverage.tests_of(toy("return (n / 2)"), checkout) == (ALL[2],)
    assert coverage.tests_of(toy("return (n - 1)"), checkout) == (ALL[0],)
    outside = replace(toy("return (n / 2)"), change=Change("constant", 2, 9, 10, "1", ""))
    assert set(coverage.tests_of(outside, checkout)) == set(ALL)
    assert Coverage({}, {}).tests_of(outside, checkout) == ("tests/test_toy.py",)


def test_gpu_tests_are_given_what_no_other_test_reaches(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = replace(toy("return (n / 2)"), file="update/offload/toy.py")
    (checkout / "src/echelon/update/offload").mkdir(parents=True)
    (checkout / "src/echelon/update/offload/toy.py").write_text(_SOURCE)
    reaching = Coverage(dict.fromkeys(ALL, 0.1), {"update/offload/toy.py::other": {"return n * 2": [2]}})
    around = Coverage(dict.fromkeys(ALL, 0.1), {"update/offload/toy.py::other": {"x": [1]}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_gpu = "tests/gpu/test_offload_optimizer.py"
    assert reaching.tests_of(kernel, checkout) == (ALL[2],)
    assert around.tests_of(kernel, checkout) == (ALL[1], on_gpu)
    assert Coverage({}, {}).tests_of(kernel, checkout) == (on_gpu,)
