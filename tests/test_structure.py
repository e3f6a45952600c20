"""The size of the house: rooms, files, functions and classes that a reader can hold in mind."""

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from echelon.launching import Ranks
from tests.step_files import files_of_a_step

TESTS = Path(__file__).parent
SOURCES = TESTS.parent / "src" / "echelon"
FILES = sorted(SOURCES.rglob("*.py"))

# Triton compiles a kernel as one function: its 79 lines are two calls with 19 arguments each.
KERNELS = {"update/precision/fused_adam_kernel.py:_update"}
# The signature and the docstring of the public function are most of it.
PUBLIC = {"engine/parallelize.py:parallelize"}
# Modules of names alone (test_public_names.py), the fields that parallelize fills (test_parallelize.py), and
# the work of engine/state_calls.py (test_state_calls.py).
TESTED_ELSEWHERE = {
    "experts.py",
    "optim.py",
    "sequence.py",
    "version.py",
    "engine/setup.py",
    "engine/saving/whole_tensors.py",
}


def definitions(*kinds: Any) -> Iterator[tuple[str, Any]]:
    """Functions or classes, by file and name."""
    for path, nodes in parsed().items():
        for node in nodes:
            if isinstance(node, kinds):
                yield f"{path.relative_to(SOURCES).as_posix()}:{node.name}", node


@cache
def parsed() -> dict[Path, list[ast.AST]]:
    return {path: list(ast.walk(ast.parse(path.read_bytes()))) for path in FILES}


def test_there_are_few_rooms_and_files() -> None:
    rooms = {path.relative_to(SOURCES).parts[0] for path in FILES if path.parent != SOURCES}
    assert len(rooms) <= 17
    assert len(FILES) <= 450
    folders = Counter(path.parent.relative_to(SOURCES).as_posix() for path in FILES)
    assert {folder: count for folder, count in folders.items() if count > 20} == {}


def test_files_functions_and_classes_are_short() -> None:
    lengths = {path.relative_to(SOURCES).as_posix(): len(path.read_bytes().splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
    functions = dict(definitions(ast.FunctionDef, ast.AsyncFunctionDef))
    long = {name for name, node in functions.items() if node.end_lineno - node.lineno >= 60}
    assert long - PUBLIC == KERNELS
    methods = {
        name: sum(isinstance(each, ast.FunctionDef) for each in node.body)
        for name, node in definitions(ast.ClassDef)
    }
    assert {name: count for name, count in methods.items() if count > 40} == {}


def test_every_module_has_its_test() -> None:
    modules = {path.relative_to(SOURCES) for path in FILES if not path.name.startswith("__")}
    missing = {
        each.as_posix() for each in modules if not (TESTS / each.parent / f"test_{each.name}").exists()
    }
    assert missing == TESTED_ELSEWHERE


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
