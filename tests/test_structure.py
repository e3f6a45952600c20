"""The size of the house: rooms, files, functions and classes that a reader can hold in mind."""

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from echelon.launching import Ranks
from tests.step_files import files_of_a_step

TESTS = Path(__file__).parent
SOURCES = TESTS.parent / "src" / "echelon"
FILES = sorted(SOURCES.rglob("*.py"))

# The signature and the docstring of the public function are most of it.
PUBLIC = {"engine/parallelize.py:parallelize"}
# Modules of names alone (test_public_names.py), and the fields that parallelize fills (test_parallelize.py).
TESTED_ELSEWHERE = {
    "experts.py",
    "integrations.py",
    "optim.py",
    "sequence.py",
    "version.py",
    "engine/layer_compiler.py",
    "engine/layer_passes.py",
    "engine/setup.py",
}


class Definition(NamedTuple):
    """A function, or a class, by file and name."""

    name: str
    is_class: bool
    lines: int
    num_methods: int


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node; of expressions, which are most of a tree, none is visited."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from statements(child)


def definitions() -> Iterator[Definition]:
    for path in FILES:
        file = path.relative_to(SOURCES).as_posix()
        for node in statements(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                assert node.end_lineno is not None
                methods = sum(isinstance(each, ast.FunctionDef) for each in node.body)
                lines = node.end_lineno - node.lineno + 1
                yield Definition(f"{file}:{node.name}", isinstance(node, ast.ClassDef), lines, methods)


def test_there_are_few_rooms_and_files() -> None:
    rooms = {path.relative_to(SOURCES).parts[0] for path in FILES if path.parent != SOURCES}
    assert len(rooms) <= 17
    assert len(FILES) <= 500
    folders = Counter(path.parent.relative_to(SOURCES).as_posix() for path in FILES)
    assert {folder: count for folder, count in folders.items() if count > 20} == {}


def test_files_functions_and_classes_are_short() -> None:
    lengths = {path.relative_to(SOURCES).as_posix(): len(path.read_bytes().splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
    found = list(definitions())
    assert {each.name for each in found if not each.is_class and each.lines > 60} == PUBLIC
    assert [each for each in found if each.is_class and each.num_methods > 40] == []


def test_every_module_has_its_test() -> None:
    modules = {path.relative_to(SOURCES) for path in FILES if not path.name.startswith("__")}
    missing = {
        each.as_posix() for each in modules if not (TESTS / each.parent / f"test_{each.name}").exists()
    }
    assert missing <= TESTED_ELSEWHERE


@pytest.mark.parametrize(
    ("plan", "most"),
    [
        ("data=2", 40),
        ("data=2 zero=3", 50),
        ("pipeline=2 microbatches=4", 42),
        ("data=2 expert=2", 60),
        ("offload=optimizer", 45),
    ],
)
def test_a_step_passes_through_few_files(plan: str, most: int, warm_ranks: Callable[[int], Ranks]) -> None:
    ranks = 1 if plan == "offload=optimizer" else 2
    of_ranks = warm_ranks(ranks).run(files_of_a_step, plan) if ranks > 1 else [files_of_a_step(plan)]
    for files in of_ranks:
        assert "engine/step/step.py" in files
        assert len(files) <= most, "\n".join(files)
