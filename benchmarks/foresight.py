"""Predicted memory against the code: dry runs of plans over every axis, for three kinds of models.

    python -m benchmarks.foresight

writes benchmarks/results/foresight.json, from which docs/generate.py makes a table of docs/planner.md. It
ends with exit code 1 if model state is not within 2 %, or the peak of nine plans of ten not within 5 %.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.result import make_result
from echelon.engine.dry_run import dry_run
from echelon.models import ModelConfig, build, cross_entropy, preset
from echelon.plan import Plan
from echelon.planner.cluster.measured import Figures, cpu_cluster
from echelon.planner.foresight.predict import predict
from echelon.planner.shape.presets import shape_of

SAMPLES = 16
MODELS = {
    "gpt": replace(preset("gpt-tiny"), layers=8, width=256, heads=8, sequence=128, vocab=2048),
    "llama": replace(
        preset("llama-tiny"), layers=8, width=256, heads=8, kv_heads=4, sequence=128, vocab=2048
    ),
    "moe": replace(preset("moe-tiny"), layers=8, sequence=128),
}
PLANS = (
    "data=1",
    "data=8",
    "data=8 zero=1",
    "data=8 zero=2",
    "data=8 zero=3",
    "data=8 zero=3 shard=4",
    "data=8 zero=3 microbatches=2",
    "data=4 zero=3 recompute=full",
    "data=2 recompute=sqrt",
    "data=4 recompute=selective",
    "data=8 zero=1 offload=optimizer",
    "data=2 offload=parameters",
    "data=2 offload=activations",
    "data=2 update=backward",
    "data=2 masters=false",
    "tensor=2",
    "tensor=2 sequence=true",
    "pipeline=4 microbatches=8",
    "pipeline=4 microbatches=8 schedule=gpipe",
    "pipeline=4 microbatches=8 schedule=zero-bubble",
    "pipeline=2 chunks=2 schedule=interleaved data=2 microbatches=4",
    "context=4 zero=1",
    "context=2 attention=all-to-all",
    "data=2 tensor=2 pipeline=2 zero=1 sequence=true microbatches=4",
)
OF_EXPERTS = ("data=4 expert=4", "data=4 expert=2 zero=1", "data=2 expert=2 pipeline=2 microbatches=4")
MOST_STATES, MOST_PEAK, SHARE = 0.02, 0.05, 0.9
# Rates play no part in memory.
_FIGURES = Figures(dict.fromkeys(("fp64", "fp32", "bf16", "fp16"), 5e10), 2e10, 8e9, 5e-6)


class Gap(NamedTuple):
    """Predicted over what the code holds, less 1: model state between steps, and the peak of a step."""

    states: float
    peak: float


def gap(config: ModelConfig, words: str) -> Gap:
    """Predict rank 0 of a plan, and run it."""
    plan = Plan.parse(f"{words} precision=bf16")
    tokens = torch.zeros(SAMPLES // plan.data, config.sequence, dtype=torch.int64)
    cluster = cpu_cluster(_FIGURES, plan.ranks)
    predicted = predict(shape_of(config), plan, cluster, SAMPLES).memory[0]
    found = dry_run(
        partial(build, config), plan, (tokens, tokens), optimizer=_adamw, loss=cross_entropy
    ).memory
    kept = found.now["parameters"] + found.now["optimizer"]
    gathered = found.peak["parameters"] - found.now["parameters"]
    return Gap(
        (predicted.parameters + predicted.optimizer) / kept - 1,
        predicted.metered / (found.peak_total - gathered) - 1,
    )


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def row(words: str) -> dict[str, Any]:
    names = ("moe",) if words in OF_EXPERTS else tuple(MODELS)
    gaps = {name: gap(MODELS[name], words) for name in names}
    empty = dict.fromkeys((f"{name} {part}" for name in MODELS for part in Gap._fields), "")
    found = {f"{name} {part}": getattr(gaps[name], part) for name in names for part in Gap._fields}
    return {"plan": f"`{words}`"} | empty | found


def is_held(rows: list[dict[str, Any]]) -> bool:
    """Whether model state is within its limit always, and the peak nine times of ten."""
    states = [abs(row[name]) for row in rows for name in row if name.endswith("states") and row[name] != ""]
    peaks = [abs(row[name]) for row in rows for name in row if name.endswith("peak") and row[name] != ""]
    num_close = sum(each <= MOST_PEAK for each in peaks)
    return bool(max(states) <= MOST_STATES and num_close >= SHARE * len(peaks))


def shown(row: dict[str, Any]) -> dict[str, str]:
    return {name: f"{value:+.1%}" if isinstance(value, float) else value for name, value in row.items()}


def main() -> None:
    rows = [row(words) for words in (*PLANS, *OF_EXPERTS)]
    result = make_result("foresight", "python -m benchmarks.foresight", {"samples": SAMPLES}, [])
    record = result.to_dict() | {"gaps": rows, "table": list(map(shown, rows))}
    path = Path(__file__).parent / "results" / "foresight.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if is_held(rows) else 1)


if __name__ == "__main__":
    main()
