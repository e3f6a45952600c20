"""The benches by name, and `run`. A bench takes `quick` and returns (settings, rows); see bench files."""

from collections.abc import Callable
from typing import Any

from echelon.bench import collectives, data_parallel, launching, pipeline, step, tensor
from echelon.bench.compare import Row
from echelon.bench.result import Result, make_result
from echelon.errors import UserError, did_you_mean

Bench = Callable[[bool], tuple[dict[str, Any], list[Row]]]


def benches() -> dict[str, Bench]:
    """Every bench under its name; the first line of its docstring says what it measures."""
    return {
        "launch": launching.bench,
        "collectives": collectives.bench,
        "step": step.bench,
        "data-parallel": data_parallel.bench,
        "pipeline": pipeline.bench,
        "tensor": tensor.bench,
    }


def run(name: str, *, quick: bool = False) -> Result:
    """Measure. `quick` only shows that a bench works: few rounds, small sizes, meaningless figures."""
    available = benches()
    if name not in available:
        raise UserError(f"'{name}' is not a bench{did_you_mean(name, available)}")
    settings, rows = available[name](quick)
    command = f"echelon bench {name}{' --quick' if quick else ''}"
    return make_result(name, command, settings, rows)
