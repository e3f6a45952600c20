"""The result of a bench as plain data: where it comes from, and its rows. Saved as JSON.

It can be published: it has no host names, user names or paths.
"""

import dataclasses
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import echelon
from benchmarks.compare import Row, Spread
from echelon import hardware
from echelon.errors import UserError


@dataclass(frozen=True)
class Result:
    """`commit` is None outside a checkout, and ends in -dirty if files were changed since. `sources` are the
    hashes of what was measured, by path; results of before there were any have none."""

    name: str
    command: str
    commit: str | None
    date: str
    versions: dict[str, str]
    hardware: dict[str, Any]
    settings: dict[str, Any]
    rows: tuple[Row, ...]
    sources: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def make_result(
    name: str,
    command: str,
    settings: dict[str, Any],
    rows: Iterable[Row],
    sources: dict[str, str] | None = None,
) -> Result:
    """The rows with everything needed to measure them again."""
    return Result(
        name=name,
        command=command,
        commit=commit(Path(echelon.__file__)),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=_versions(),
        hardware=_hardware(),
        settings=settings,
        rows=tuple(rows),
        sources=sources or {},
    )


def read(path: Path) -> Result:
    """A result as `save` has written it; of records with more, this part."""
    data = json.loads(path.read_text(encoding="utf-8"))
    spreads = ("seconds", "ratio")
    rows = [Row(**row | {name: Spread(**row[name]) for name in spreads}) for row in data["rows"]]
    known = [each.name for each in dataclasses.fields(Result)]
    return Result(**{name: data[name] for name in known if name in data} | {"rows": tuple(rows)})


def save(result: Result, folder: Path) -> Path:
    """Write `folder`/NAME.json, replacing an older one; returns its path."""
    path = folder / f"{result.name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result.to_dict(), indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--out {folder}: {path} cannot be written: {error.strerror or error}") from error
    return path


def place_errors(folder: Path, names: Iterable[str]) -> list[str]:
    """Why results of these names could not be saved in `folder`: to know before the measuring, not after."""
    if folder.is_file() or (folder.suffix == ".json" and not folder.exists()):
        return [f"--out {folder}: must be a folder, in which NAME.json is written"]
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return [f"--out {folder}: cannot be written: {error.strerror or error}; choose another folder"]
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()
    files = [folder / f"{name}.json" for name in names]
    return [
        f"--out {folder}: {path} is there and cannot be replaced; remove it, or choose another folder"
        for path in files
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK))
    ]


def commit(file: Path) -> str | None:
    """The commit that is checked out where `file` is tracked, or None."""
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None  # no checkout, or the environment lies inside a checkout of another project
    return _git(file.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "numpy")}
    return {"echelon": echelon.__version__, "python": platform.python_version()} | packages


def _hardware() -> dict[str, Any]:
    return {
        "cpu": hardware.cpu_model(),
        "cores": hardware.usable_cores(),
        "memory_bytes": hardware.total_memory(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }
