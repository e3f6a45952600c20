"""What a rank moves and holds, by plan words: a dry run of each plan, in bytes that any machine finds alike.

    python -m benchmarks.dry_runs

writes benchmarks/results/dry-run.json, from which docs/generate.py makes the table of docs/dry-run.md.
"""

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.result import make_result
from echelon.engine.dry_run import dry_run
from echelon.models import build, cross_entropy
from echelon.plan import Plan

MODEL, RANKS, SAMPLES, LENGTH = "llama3-8b", 8, 16, 4096
PLANS = (
    "data=8",
    "data=8 zero=1",
    "data=8 zero=2",
    "data=8 zero=3",
    "data=8 zero=3 shard=4",
    "data=8 zero=3 microbatches=2",
    "data=8 zero=3 recompute=full",
    "data=8 zero=1 offload=optimizer",
    "tensor=8",
    "tensor=8 sequence=true",
    "pipeline=8 microbatches=16",
    "pipeline=8 microbatches=16 schedule=gpipe",
    "pipeline=4 chunks=2 schedule=interleaved data=2 microbatches=8",
    "context=8 zero=1",
    "context=8 attention=all-to-all zero=1",
    "data=2 tensor=2 pipeline=2 zero=1 sequence=true microbatches=8",
)
# With hybrid sharding, replicas are ranks along `shard` and `copies`.
AXES = {
    "data": ("data", "shard", "copies"),
    "tensor": ("tensor",),
    "context": ("context",),
    "pipeline": ("pipeline",),
}


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def row(plan: str) -> dict[str, Any]:
    """What rank 0 sends in its second step, by axis, and what it holds at the peak."""
    parsed = Plan.parse(f"{plan} precision=bf16")
    tokens = torch.zeros(SAMPLES // parsed.data, LENGTH, dtype=torch.int64)
    found = dry_run(partial(build, MODEL), parsed, (tokens, tokens), optimizer=adamw, loss=cross_entropy)
    sent = {f"{name}_bytes": sum(map(found.sent, axes)) for name, axes in AXES.items()}
    peak = {name: found.memory.peak[name] for name in ("parameters", "gradients", "optimizer", "activations")}
    host = sum(found.memory.host_peak.values())
    held = {f"{name}_bytes": size for name, size in (peak | {"host": host}).items()}
    return {"plan": f"`{plan}`"} | sent | held


def main() -> None:
    settings = {"model": MODEL, "ranks": RANKS, "samples": SAMPLES, "length": LENGTH}
    result = make_result("dry-run", "python -m benchmarks.dry_runs", settings, [])
    record = result.to_dict() | {"table": [row(plan) for plan in PLANS]}
    path = Path(__file__).parent / "results" / "dry-run.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
