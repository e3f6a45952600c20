"""Draws mutants by a seed: the same number of each package of the heart, each change as likely as another."""

import difflib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import PACKAGE, ROOT, forget_compiled
from tests.mutants.sampling.operators import Change, changes
from tests.mutants.sampling.tracer.sitecustomize import traced_files

HEART = {
    "data_parallel": ("parallel/data",),
    "runtime": ("engine/step/runtime", "parallel/stage.py", "update/*.py"),
    "program": ("program",),
    "precision": ("update/precision",),
    "optim": ("update/optim",),
    "checkpoint": ("state/checkpoint",),
    "recompute": ("memory/recompute",),
    "offload": ("update/offload", "memory/activation_offload"),
    "experts": ("nn/experts", "parallel/expert"),
    "audit": ("engine/audit",),
    "weight_files": ("state/weight_files",),
}


@dataclass(frozen=True)
class DrawnMutant:
    """A change of one file below src/echelon, and the tests that may find it."""

    package: str
    file: str
    change: Change
    tests: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.file}:{self.change.line} {self.change.kind}"

    def diff(self, root: Path = ROOT) -> list[str]:
        """The lines that change."""
        old = (root / PACKAGE / self.file).read_text(encoding="utf-8")
        lines = difflib.unified_diff(
            old.splitlines(), self.change.made_in(old).splitlines(), n=0, lineterm=""
        )
        return [line for line in lines if not line.startswith(("---", "+++", "@@"))]

    def apply(self, copy: Path) -> None:
        """Make the change in a copy of `src`."""
        source = copy / "echelon" / self.file
        text = self.change.made_in(source.read_text(encoding="utf-8"))
        source.write_text(text, encoding="utf-8")
        forget_compiled(source)


def all_mutants(package: str, root: Path = ROOT) -> list[DrawnMutant]:
    """Every change of a package of the heart."""
    source = root / PACKAGE
    paths = map(Path, traced_files(source, HEART[package]))
    return [
        DrawnMutant(package, path.relative_to(source).as_posix(), change)
        for path in paths
        for change in changes(path.read_text(encoding="utf-8"))
    ]


def draw(
    count: int, seed: int, packages: Sequence[str] = tuple(HEART), root: Path = ROOT
) -> list[DrawnMutant]:
    """`count` mutants, spread over `packages`. A package's draw does not depend on which others are drawn."""
    drawn = []
    for place, package in enumerate(packages):
        number = count // len(packages) + (place < count % len(packages))
        mutants = all_mutants(package, root)
        drawn += random.Random(f"{seed} {package}").sample(mutants, min(number, len(mutants)))
    return drawn
