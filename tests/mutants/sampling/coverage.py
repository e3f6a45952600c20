"""Which tests a change is given to: those that run its line, of as many files as possible, the quick ones.

The map is made of the tracer's records. It finds lines by their function and their text, so that it is still
of use when a file has changed elsewhere. A line that no test ran is given to the tests of its function, one
of a function that none ran to the tests of its file; and what the record does not know at all to the test
files that name its module. What runs when a module is imported (constants, defaults) says nothing of who
uses it, and counts as not run. Where there is a GPU, its tests are given all lines that no other test ran.
"""

import ast
import json
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import final

import torch

from tests.mutants.mutant import PACKAGE, ROOT
from tests.mutants.sampling.draw import DrawnMutant
from tests.mutants.sampling.tracer.sitecustomize import RECORD, traced_files

MOST_SECONDS = 30.0  # of tests for one mutant
_MOST_TESTS = 80
_GPU_TESTS = {
    "memory/activation_offload": ("offload_activations",),
    "state/checkpoint": ("checkpoint",),
    "parallel/data": ("data_parallel", "offload_parameters"),
    "nn/experts": ("moe_compute",),
    "update/offload": ("offload_optimizer",),
    "update/optim": ("optimizers",),
    "update/precision": ("rounding", "fused_adam", "nonfinite"),
    "memory/recompute": ("no_sync",),
    "engine/step/runtime": ("pipeline", "nccl"),
}

Lines = dict[str, list[int]]  # by the text of a line: which tests reach it


@final
class Coverage:
    """`seconds`: of each test. `functions`: by "file::function"."""

    def __init__(self, seconds: Mapping[str, float], functions: Mapping[str, Lines]) -> None:
        self._seconds, self._functions = seconds, functions
        self._tests = list(seconds)

    @classmethod
    def load(cls, path: Path) -> "Coverage":
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else cls({}, {})

    def save(self, path: Path) -> None:
        text = json.dumps({"seconds": self._seconds, "functions": self._functions}, separators=(",", ":"))
        path.write_text(text, encoding="utf-8")

    def tests_of(self, mutant: DrawnMutant, root: Path = ROOT) -> tuple[str, ...]:
        """In the order in which they run: the quickest first."""
        source = (root / PACKAGE / mutant.file).read_text(encoding="utf-8")
        function, text = _places(source)[mutant.change.line - 1]
        lines = self._functions.get(f"{mutant.file}::{function}", {})
        reached = lines.get(text)
        on_gpu = _gpu_tests(mutant.file) if reached is None and torch.cuda.is_available() else ()
        numbers = reached or {number for each in lines.values() for number in each}
        if not numbers and not on_gpu:
            of_file = [v for key, v in self._functions.items() if key.startswith(f"{mutant.file}::")]
            numbers = {number for lines in of_file for each in lines.values() for number in each}
        tests = spread([self._tests[number] for number in numbers], self._seconds, _mirror(mutant.file))
        in_order = (*sorted(tests, key=self._seconds.__getitem__), *on_gpu)
        return in_order or tuple(_naming(mutant.file, root))

    def seconds_of(self, tests: Iterable[str]) -> float:
        return sum(self._seconds.get(test, 10.0) for test in tests)


def spread(tests: Iterable[str], seconds: Mapping[str, float], mirror: str = "") -> list[str]:
    """Tests of as many files and functions as fit into the time: those of the file that mirrors the source,
    then one of each other file, then a second of each …"""
    turns: defaultdict[str, int] = defaultdict(int)
    of_functions: defaultdict[str, list[str]] = defaultdict(list)
    for test in sorted(tests, key=lambda test: (seconds[test], test)):
        of_functions[test.partition("[")[0]].append(test)
    ordered = []
    for cases in of_functions.values():
        for case, test in enumerate(cases):
            file = test.partition("::")[0]
            turn = case // 8 - 1 if file == mirror else turns[file] + 4 * case
            ordered.append((turn, seconds[test], test))
            turns[file] += case == 0
    chosen, total = [], 0.0
    for _, cost, test in sorted(ordered):
        if len(chosen) < _MOST_TESTS and (total + cost <= MOST_SECONDS or not chosen):
            chosen.append(test)
            total += cost
    return chosen


def merge(records: Path, packages: list[str], root: Path = ROOT) -> Coverage:
    """The map of all folders that are recorded."""
    source = root / PACKAGE
    files = traced_files(source, packages)
    seconds: dict[str, float] = {}
    found: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for folder in sorted(records.iterdir()):
        if not (folder / "done").is_file():
            continue
        lines = (folder / "tests").read_text(encoding="utf-8").splitlines()
        tests = {number: (nodeid, cost) for number, nodeid, cost in map(json.loads, lines)}
        seconds |= dict(tests.values())
        data = (folder / "hits").read_bytes()
        for test, file, line in struct.iter_unpack(
            RECORD.format, data[: len(data) // RECORD.size * RECORD.size]
        ):
            if test in tests:
                found[file, line].add(tests[test][0])
    numbers = {test: number for number, test in enumerate(seconds)}
    functions: defaultdict[str, Lines] = defaultdict(dict)
    for number, path in enumerate(files):
        file = Path(path).relative_to(source).as_posix()
        source_text = Path(path).read_text(encoding="utf-8")
        called = _called_lines(source_text)
        for line, (function, text) in enumerate(_places(source_text), 1):
            if (number, line) in found and line in called:
                tests_of_line = spread(found[number, line], seconds, _mirror(file))
                chosen = [numbers[test] for test in tests_of_line]
                functions[f"{file}::{function}"][text] = chosen
    return Coverage(seconds, functions)


def _places(source: str) -> list[tuple[str, str]]:
    """For each line: the function or class that it stands in, and its text; numbered, where it repeats."""
    names: dict[int, str] = {}
    times: defaultdict[tuple[str, str], int] = defaultdict(int)

    def visit(node: ast.AST, around: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = around
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{around}.{child.name}".lstrip(".")
                names.update(dict.fromkeys(range(child.lineno, (child.end_lineno or 0) + 1), name))
            visit(child, name)

    visit(ast.parse(source), "")
    places = []
    for line, content in enumerate(source.splitlines(), 1):
        place = names.get(line, ""), content.strip()
        times[place] += 1
        places.append((place[0], f"{place[1]} #{times[place]}" if times[place] > 1 else place[1]))
    return places


def _called_lines(source: str) -> set[int]:
    """Those in the body of a function; others run when the module is imported."""
    functions = [
        n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {line for n in functions for line in range(n.body[0].lineno, (n.end_lineno or 0) + 1)}


def _mirror(file: str) -> str:
    """The test file of a source file, by its name."""
    folder, _, name = file.rpartition("/")
    return f"tests/{folder}/test_{name}"


def _gpu_tests(file: str) -> tuple[str, ...]:
    """Those that may reach a line of a file which none of the recorded tests did."""
    names = next((names for folder, names in _GPU_TESTS.items() if file.startswith(f"{folder}/")), ())
    return tuple(f"tests/gpu/test_{name}.py" for name in names)


def _naming(file: str, root: Path) -> Iterator[str]:
    """Test files that import a module, or have its name; those of its own package first."""
    module = "echelon." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, name = module.rpartition(".")
    paths = sorted((root / "tests").rglob("test_*.py"), key=lambda path: path.parent.name not in package)
    for path in paths:
        if path.parent.name != "mutants" and (
            path.stem == f"test_{name}"
            or module in (text := path.read_text(encoding="utf-8"))
            or f"from {package} import" in text
        ):
            yield path.relative_to(root).as_posix()
