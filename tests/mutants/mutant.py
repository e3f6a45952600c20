"""A mutant: one mistake in one source file, as text in and text out, and the tests that must find it.

The list is in `changes/*.toml`. Every table there is one mutant, under its name:

    [ring-sends-the-wrong-chunk]
    file = "collectives/ring.py"            # below src/echelon
    old = "chunks[(rank - step) % size]"    # occurs exactly once in the file
    new = "chunks[(rank - step + 1) % size]"
    tests = ["tests/collectives/test_groups.py::test_ring"]
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHANGES = Path(__file__).parent / "changes"
PACKAGE = Path("src") / "echelon"


@dataclass(frozen=True)
class Mutant:
    """One planted mistake."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def errors(self, root: Path = ROOT) -> Iterator[str]:
        """Why this mutant cannot be run in the checkout at `root`."""
        source = root / PACKAGE / self.file
        if not source.is_file():
            yield f"{self.name}: {self.file} does not exist"
        elif (count := source.read_text(encoding="utf-8").count(self.old)) != 1:
            yield f"{self.name}: `old` occurs {count} times in {self.file}, must be once"
        if self.old == self.new:
            yield f"{self.name}: `new` is the same as `old`"
        if not self.tests:
            yield f"{self.name}: no tests are named for it"
        for test in self.tests:
            if not _exists(test, root):
                yield f"{self.name}: {test} does not exist"

    def apply(self, copy: Path) -> None:
        """Make the change in a copy of `src`, where compiled files may lie beside the sources."""
        source = copy / "echelon" / self.file
        source.write_text(source.read_text(encoding="utf-8").replace(self.old, self.new), encoding="utf-8")
        forget_compiled(source)


def forget_compiled(source: Path) -> None:
    """Remove what Python has compiled of a source that has changed."""
    for compiled in (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"):
        compiled.unlink()


def load_mutants(folder: Path = CHANGES) -> list[Mutant]:
    """All mutants of the list, in the order of the files and of the tables in them."""
    mutants = []
    for path in sorted(folder.glob("*.toml")):
        for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
            mutants.append(Mutant(name, table["file"], table["old"], table["new"], tuple(table["tests"])))
    return mutants


def _exists(test: str, root: Path) -> bool:
    """Whether a test, given as pytest takes it, is in a file of its name."""
    path, _, function = test.partition("::")
    file = root / path
    if not file.is_file():
        return False
    name = function.partition("[")[0]
    return not name or f"def {name}(" in file.read_text(encoding="utf-8")
