"""What each bench measures: the sources whose change makes its results stale, and the page that explains it.

A result keeps a hash of each of these files and folders. It is stale when one of them has another hash now.
The hashes are of contents, so no date, commit or checkout plays a part.
"""

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

_ROOT = Path(__file__).parent.parent
_PACKAGE = "src/echelon"

_STEP = ("collectives", "engine", "models", "nn", "parallel", "program", "update")  # of a training step

_CHARTS = ("train/charts.py", "program/picture.py", "report/assets/uPlot.iife.min.js")


class Subject(NamedTuple):
    """The page that explains a bench, and the rooms of the package that it measures."""

    page: str
    rooms: tuple[str, ...]


SUBJECTS = {
    "launch": Subject("launch.md", ("launching",)),
    "collectives": Subject("collectives.md", ("collectives",)),
    "step": Subject("data-parallel.md", _STEP),
    "data-parallel": Subject("data-parallel.md", _STEP),
    "pipeline": Subject("pipeline.md", _STEP),
    "tensor": Subject("tensor.md", ("collectives", "models", "nn", "parallel/tensor")),
    "start": Subject("large-models.md", (*_STEP, "state")),
    "checkpoint": Subject("checkpoints.md", ("engine", "state")),
    "memory": Subject("memory.md", (*_STEP, "memory")),
    "one-gpu": Subject("gpu.md", _STEP),
    "short-steps": Subject("graphs.md", _STEP),
    "kernels": Subject("gpu.md", ("nn",)),
    "recompute": Subject("recompute.md", (*_STEP, "memory")),
    "optimizer-step": Subject("precision.md", ("update",)),
    "selective-costs": Subject("selective-recompute.md", ("nn/dropout",)),
    "charts": Subject("report.md", _CHARTS),
    "moe-dense": Subject("experts.md", (*_STEP, "data")),
    "largest-model": Subject("offload-parameters.md", (*_STEP, "data", "memory", "state")),
    "gist": Subject("gist.md", (*_STEP, "memory")),
    "gist-accuracy": Subject("gist.md", (*_STEP, "data", "memory")),
    "offload-optimizer": Subject("offload.md", _STEP),
    "offload-activations": Subject("offload-activations.md", (*_STEP, "memory")),
    "moe-layer": Subject("experts.md", ("experts.py", "models", "nn")),
}


def hashes(name: str, module: ModuleType) -> dict[str, str]:
    """By path, the hash of everything that the bench of this module measures, and of its own modules."""
    rooms = [f"{_PACKAGE}/{room}" for room in SUBJECTS[name].rooms]
    return {path: _hash(_ROOT / path) for path in [*_modules(module), *rooms]}


def are_current(kept: Mapping[str, str]) -> bool:
    """Whether all contents are still those of a result. Results of before there were hashes are older."""
    return bool(kept) and all(_hash(_ROOT / path) == digest for path, digest in kept.items())


def _modules(bench: ModuleType) -> list[str]:
    """The bench's own file, and those of this package that it imports from."""
    package = f"{__package__}."
    values = [
        getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in vars(bench).values()
    ]
    names = {bench.__name__, *(name for name in values if isinstance(name, str) and name.startswith(package))}
    return sorted(f"{name.replace('.', '/')}.py" for name in names)


def _hash(path: Path) -> str:
    """Of a file, or of all Python files of a folder and their names."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.is_file() else []
    digest = blake2b(digest_size=8)
    for file in files:
        digest.update(f"{file.relative_to(_ROOT).as_posix()}\0".encode())
        digest.update(blake2b(file.read_bytes()).digest())
    return digest.hexdigest()
