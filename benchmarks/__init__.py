"""Benchmarks: contenders side by side in one run, compared by paired ratios.

    result = run("step")
    save(result, Path("benchmarks/results"))

Importing this package imports torch, but not rich.
"""

from benchmarks.catalog import Bench, benches, run, runnable
from benchmarks.compare import Row, Spread
from benchmarks.render import render
from benchmarks.result import Result, place_errors, save
from benchmarks.targets import missed

__all__ = [
    "Bench",
    "Result",
    "Row",
    "Spread",
    "benches",
    "missed",
    "place_errors",
    "render",
    "run",
    "runnable",
    "save",
]
