"""The bench `charts`: drawing by hand, as echelon does, beside libraries that draw.

Pictures are drawn in fresh processes (see drawing.py). Of libraries for the report page, the code is measured
that the page would hold: npm delivers it, and Node, whose engine is Chromium's, compiles it.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import drawing
from benchmarks.compare import Row, compare
from benchmarks.drawing import LOSS, OURS, PEER, SCHEDULE
from benchmarks.harness import Contender, alternate, tell

_ASSETS = Path(drawing.__file__).parents[1] / "src/echelon/report/assets"
UPLOT = "uPlot, in the page"
# By library, the npm packages and the file of each that a page needs.
PAGE_PEERS = {
    "Plotly, basic bundle": {"plotly.js-basic-dist-min@4.1.1": "plotly-basic.min.js"},
    "Vega-Lite": {
        "vega@6.4.0": "build/vega.min.js",
        "vega-lite@6.4.3": "build/vega-lite.min.js",
        "vega-embed@7.3.0": "build/vega-embed.min.js",
    },
}
_COMPILE = """
const fs = require("fs"), vm = require("vm")
const texts = process.argv.slice(1).map((path) => fs.readFileSync(path, "utf8"))
const start = performance.now()
for (const text of texts) new vm.Script(text)
console.log((performance.now() - start) / 1000)
"""


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """Seconds, memory and bytes of charts drawn by echelon and by matplotlib, and bytes of page code."""
    rounds, steps, microbatches = (1, 100, 8) if quick else (15, 10_000, 32)
    settings: dict[str, Any] = {"rounds": rounds, "not_installed": [], "remarks": []}
    try:
        settings["remarks"] += [f"{PEER} {version(PEER)}, without pyplot; time from its import to the file"]
    except PackageNotFoundError:
        settings["not_installed"] += [PEER]
    peers = [] if settings["not_installed"] else [f"{PEER}, SVG", f"{PEER}, PNG"]
    cases = {
        f"loss of {steps:,} steps": (LOSS, steps),
        f"1f1b, {drawing.STAGES} stages, {microbatches} microbatches": (SCHEDULE, microbatches),
    }
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for title, (case, size) in cases.items():
            tell("charts", title)
            rows += _pictures(title, case, size, [f"{OURS}, SVG", *peers], rounds, Path(folder))
        codes, missing = _page_codes(Path(folder))
        settings["not_installed"] += missing
        if shutil.which("node"):
            settings["remarks"] += ["code of a page: " + ", ".join(_packages(codes)) + "; time to compile it"]
            rows += _compiled(codes, rounds)
    return settings, rows


def _pictures(
    title: str, case: str, size: int, contenders: Sequence[str], rounds: int, folder: Path
) -> list[Row]:
    extras: dict[str, dict[str, float]] = {}
    turns = {name: partial(_draw, case, name, size, folder, extras) for name in contenders}
    return _rows(title, turns, rounds, extras)


def _draw(case: str, name: str, size: int, folder: Path, extras: dict[str, dict[str, float]]) -> float:
    """Draw once in a fresh process; returns the seconds, and notes the other figures."""
    drawer, _, kind = name.partition(", ")
    file = folder / f"{case}-{drawer}.{kind.lower()}"
    program = [sys.executable, "-P", drawing.__file__, case, drawer, str(file), str(size)]
    # Imports are of compiled files, as after an installation.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(program, stdout=subprocess.PIPE, check=True, env=environment)
    measured = json.loads(done.stdout)
    extras[name] = {"file_bytes": file.stat().st_size, "peak_bytes": measured["peak_bytes"]}
    return float(measured["seconds"])


def _page_codes(folder: Path) -> tuple[dict[str, list[Path]], list[str]]:
    """The files that each library needs in a page, and the npm packages that could not be fetched."""
    codes, missing = {UPLOT: [_ASSETS / "uPlot.iife.min.js"]}, []
    for library, packages in PAGE_PEERS.items():
        files = [_fetch(package, file, folder) for package, file in packages.items()]
        missing += [package for package, file in zip(packages, files, strict=True) if file is None]
        if None not in files:
            codes[library] = [file for file in files if file is not None]
    return codes, missing


def _fetch(package: str, file: str, folder: Path) -> Path | None:
    """One file of an npm package, or None if it is not to be had."""
    try:
        command = ["npm", "pack", "--silent", "--pack-destination", str(folder), package]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        return None
    with tarfile.open(folder / done.stdout.strip()) as archive:
        archive.extract(f"package/{file}", folder, filter="data")
    return folder / "package" / file


def _packages(codes: Mapping[str, Sequence[Path]]) -> list[str]:
    return [package for library in codes for package in PAGE_PEERS.get(library, ())]


def _compiled(codes: Mapping[str, Sequence[Path]], rounds: int) -> list[Row]:
    sizes = {name: float(sum(file.stat().st_size for file in files)) for name, files in codes.items()}
    extras = {name: {"file_bytes": size} for name, size in sizes.items()}
    turns = {name: partial(_compile, files) for name, files in codes.items()}
    return _rows("code of a page with curves", turns, rounds, extras)


def _compile(files: Sequence[Path]) -> float:
    command = ["node", "-e", _COMPILE, *map(str, files)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def _rows(
    title: str, turns: Mapping[str, Contender], rounds: int, extras: Mapping[str, dict[str, float]]
) -> list[Row]:
    """Beside the first contender."""
    rows = compare(title, alternate(turns, rounds), next(iter(turns)))
    return [replace(row, extras=dict(extras[row.contender])) for row in rows]
