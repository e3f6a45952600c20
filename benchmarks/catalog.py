"""The benches by name, and `run`. A bench takes `quick` and returns (settings, rows); see bench files."""

import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import (
    charts,
    checkpoint,
    collectives,
    data_parallel,
    gist,
    gist_accuracy,
    kernels,
    largest_model,
    launching,
    memory_settings,
    moe_dense,
    moe_layer,
    offload_activations,
    offload_optimizer,
    one_gpu,
    optimizer_step,
    pipeline,
    recompute,
    selective_costs,
    short_steps,
    start,
    step,
    tensor,
)
from benchmarks.compare import Row
from benchmarks.result import Result, make_result
from benchmarks.sources import hashes
from echelon.errors import UserError, did_you_mean

_NEED_GPU = (
    "one-gpu",
    "short-steps",
    "kernels",
    "recompute",
    "optimizer-step",
    "largest-model",
    "gist",
    "gist-accuracy",
    "offload-optimizer",
    "offload-activations",
    "moe-layer",
)

Bench = Callable[..., tuple[dict[str, Any], list[Row]]]
_TAKES_ONLY = (
    "recompute",
    "largest-model",
    "gist",
    "gist-accuracy",
    "offload-optimizer",
    "offload-activations",
)


def benches() -> dict[str, Bench]:
    """Every bench under its name; the first line of its docstring says what it measures."""
    return {
        "launch": launching.bench,
        "collectives": collectives.bench,
        "step": step.bench,
        "data-parallel": data_parallel.bench,
        "pipeline": pipeline.bench,
        "tensor": tensor.bench,
        "start": start.bench,
        "checkpoint": checkpoint.bench,
        "memory": memory_settings.bench,
        "one-gpu": one_gpu.bench,
        "short-steps": short_steps.bench,
        "kernels": kernels.bench,
        "recompute": recompute.bench,
        "optimizer-step": optimizer_step.bench,
        "selective-costs": selective_costs.bench,
        "charts": charts.bench,
        "moe-dense": moe_dense.bench,
        "largest-model": largest_model.bench,
        "gist": gist.bench,
        "gist-accuracy": gist_accuracy.bench,
        "offload-optimizer": offload_optimizer.bench,
        "offload-activations": offload_activations.bench,
        "moe-layer": moe_layer.bench,
    }


def runnable(quick: bool) -> list[str]:
    """The names of the benches that this machine can run."""
    return [name for name in benches() if quick or name not in _NEED_GPU or torch.cuda.is_available()]


def run(name: str, *, quick: bool = False, only: str = "") -> Result:
    """Measure. `quick` only shows that a bench works: few rounds, small sizes, meaningless figures. `only`:
    the rows whose case and contender have this text, of a bench that takes long."""
    available = benches()
    if name not in available:
        raise UserError(f"'{name}' is not a bench{did_you_mean(name, available)}")
    if name not in runnable(quick):
        raise UserError(
            f"bench {name} measures a GPU, and torch sees none here; add --quick to see that it runs"
        )
    if only and name not in _TAKES_ONLY:
        raise UserError(f"bench {name} has no part to choose with --only; {', '.join(_TAKES_ONLY)} have")
    sources = hashes(name, sys.modules[available[name].__module__])
    settings, rows = available[name](quick, only) if only else available[name](quick)
    command = f"python -m benchmarks {name}{' --quick' if quick else ''}{f' --only {only!r}' if only else ''}"
    return make_result(name, command, settings, rows, sources)
