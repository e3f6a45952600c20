"""Benchmarks: contenders side by side in one run, compared by paired ratios.

    result = run("step")
    save(result, Path("benchmarks/results"))

Importing this package imports torch, but not rich.
"""

from echelon.bench.catalog import Bench, benches, run, runnable
from echelon.bench.compare import Row, Spread
from echelon.bench.render import render
from echelon.bench.result import Result, place_errors, save

__all__ = [
    "Bench",
    "Result",
    "Row",
    "Spread",
    "benches",
    "place_errors",
    "render",
    "run",
    "runnable",
    "save",
]
